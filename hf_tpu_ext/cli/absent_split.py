"""What to do about a split that a recipe's dataset does not have."""

from pathlib import Path


#: Of files with rows. A dataset's card and hidden files are none.
_SUFFIXES = {".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt"}


def advise_split(split: str, script_args) -> str:
    """
    What to type where the dataset that TRL's arguments name has no `split`. In a directory, `datasets` makes splits of files
    whose names say which rows they have, and leaves others out.
    """
    trains = split == script_args.dataset_train_split
    name, use = ("train", "to train on") if trains else ("test", "to evaluate on")
    advice = (
        f"Name its splits with dataset_train_split (now {script_args.dataset_train_split!r}) and dataset_test_split (now "
        f"{script_args.dataset_test_split!r}){'' if trains else ', or leave out eval_strategy'}."
    )
    if not script_args.dataset_name:
        return advice
    directory = Path(script_args.dataset_name)
    files = sorted(path for path in directory.glob("*") if path.suffix in _SUFFIXES)
    if not files:
        return advice
    holds = f"{directory} holds {', '.join(path.name for path in files[:5])}{', ...' * (len(files) > 5)}"
    if split != name and name in {path.stem for path in files}:
        return f"{holds}: set dataset_{name}_split to {name}. Or: {advice}"
    if {path.stem for path in files} == {"train"}:
        return f"{holds}: put rows to evaluate on beside it, as test{files[0].suffix}, or leave out eval_strategy."
    setting = "" if split == name else f" and dataset_{name}_split to {name}"
    return f"{holds}: rename the file {use} to {name}{files[0].suffix}{setting}. Or: {advice}"
