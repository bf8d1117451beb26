"""What to do about a split that a recipe's dataset does not have."""

from pathlib import Path


def advise_split(split: str, script_args) -> str:
    """
    What to type where the dataset that TRL's arguments name has no `split`. In a directory, `datasets` makes splits of files
    whose names say which rows they have, and leaves others out.
    """
    directory = Path(script_args.dataset_name or "")
    name, use = ("train", "to train on") if split == script_args.dataset_train_split else ("test", "to evaluate on")
    files = sorted(path for path in directory.glob("*.*") if path.is_file()) if script_args.dataset_name else []
    advice = (
        f"Name its splits with dataset_train_split (now {script_args.dataset_train_split!r}) and dataset_test_split (now "
        f"{script_args.dataset_test_split!r}), or leave out eval_strategy."
    )
    if not files:
        return advice
    names = ", ".join(path.name for path in files[:5]) + ", ..." * (len(files) > 5)
    setting = "" if split == name else f" and dataset_{name}_split to {name}"
    return f"{directory} holds {names}: rename the file {use} to {name}{files[0].suffix}{setting}. Or: {advice}"
