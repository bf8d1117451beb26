"""
Trains a tiny model of every family with upstream's trainer on eager CPU and with this package's on XLA, and compares them:

    python tests/models/families.py                    # all, a process for each run; what is there is not run again
    python tests/models/families.py --task causal --only qwen3 lfm2 --again
    python tests/models/families.py --layers           # of which causal models the layers run as a loop, and attention as a kernel

Results are in `families.json` and `layers.json`; `models_page.py` writes docs/models.md from them.
"""

import argparse
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from tasks import LONGEST, TASKS, make_collator, make_rows, names_of


HERE = Path(__file__).parent
RESULTS, LAYERS_OF = HERE / "families.json", HERE / "layers.json"
STEPS, ACCUMULATION, ROWS = 4, 2, 2
KINDS = ("full", "lora")
EXACTLY, BY_SGD = " in float64", " by SGD"
#: Only how the layers run is found out.
LAYERS = ", its layers"
#: Two periods of layers, in the two ways that they can run.
LOOPED, UNROLLED = " looped", " unrolled"
#: Their code makes a float32 of the smallest number of float64.
NOT_EXACTLY = ("xglm",)
#: Of one run, the imports apart: seconds of a processor, and of the clock, since others may have the machine.
MOST_SECONDS, MOST_WAITED, MOST_BYTES = 240, 1800, 12 * 2**30
MOST_PARAMETERS = 20 * 10**6


# ---- One run, in a process of its own ----


def train(task: str, model_type: str, lora: bool, recipe: str, *, ours: bool, output_dir: str) -> dict:
    """Train a tiny model, and say what was logged and what the device did."""
    settings = {}
    for suffix, scan_layers in ((LOOPED, "on"), (UNROLLED, "off")):
        if recipe.endswith(suffix):
            recipe, settings = recipe.removesuffix(suffix), {"scan_layers": scan_layers, "periods": 2}
    trainer = make_trainer(task, model_type, lora, recipe, ours=ours, output_dir=output_dir, **settings)
    # Not the class of PEFT.
    model = type(trainer.model.get_base_model() if lora else trainer.model).__name__
    found = _count(trainer) if ours else {}
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "model": model,
        "recipe": recipe.removesuffix(EXACTLY).removesuffix(BY_SGD),
        "losses": [entry["loss"] for entry in logs],
        "norms": [entry["grad_norm"] for entry in logs],
        **found,
    }


def make_trainer(
    task: str, model_type: str, lora: bool, recipe: str, *, ours: bool, output_dir: str, periods: int = 1, **settings
):
    """The trainer of a tiny model, with further settings of its arguments."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model
    from tiny_configs import VOCABULARY, tiny_config
    from transformers import Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    config = tiny_config(model_type, decoder=task == "causal", periods=periods)
    if task in ("sequence", "token"):
        # Heads that many families share have a dropout of their own unless told otherwise.
        config.num_labels, config.classifier_dropout = 3, 0.0
    auto = getattr(transformers, TASKS[task].auto)
    with torch.device("meta"):
        count = auto.from_config(config).num_parameters()
    if count > MOST_PARAMETERS:
        raise ValueError(f"a model of {count // 10**6} million parameters is not tiny")
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # Routers that begin at 0 would have ties, and which experts they take then is anybody's choice.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    if recipe.endswith(EXACTLY):
        recipe = recipe.removesuffix(EXACTLY)
        model.double()
        # The others take float32 at most.
        model.set_experts_implementation("eager")
    by_sgd = recipe.endswith(BY_SGD)
    recipe = recipe.removesuffix(BY_SGD)
    adapter = None
    if lora:
        # PEFT refuses these of a mixer, whose kernels take the weights as they are.
        mixer = any(name.endswith("conv1d") for name, _ in model.named_modules())
        excluded = [*TASKS[task].heads, *(["out_proj", "conv1d"] if mixer else [])] or None
        sizes = dict(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=excluded)
        adapter = LoraConfig(task_type=TASKS[task].peft, **sizes)
    rows = make_rows(task, config.is_encoder_decoder, STEPS * ACCUMULATION * ROWS)
    args = dict(
        output_dir=output_dir,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATION,
        optim="sgd" if by_sgd else "adamw_torch",
        learning_rate=0.1 if by_sgd else 5e-3,
        logging_steps=1,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not ours,
        **settings,
    )
    if ours:
        from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer, TPUTrainer, TPUTrainingArguments

        SFTConfig, SFTTrainer, Trainer, TrainingArguments = (
            TPUSFTConfig,
            TPUSFTTrainer,
            TPUTrainer,
            TPUTrainingArguments,
        )
        args["run_report"] = False
    from datasets import Dataset

    tokenizer = _tokenizer(VOCABULARY, LONGEST)
    if recipe == "trainer":
        data = Dataset.from_list(rows)
        if adapter is not None:
            model = get_peft_model(model, adapter)
        if ours:
            args["max_length"] = LONGEST
        collator = make_collator(task, tokenizer)
        return Trainer(model, TrainingArguments(**args), collator, data, processing_class=tokenizer)
    data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows])
    args |= dict(max_length=LONGEST, gradient_checkpointing=recipe == "sft")
    return SFTTrainer(model, SFTConfig(**args), train_dataset=data, processing_class=tokenizer, peft_config=adapter)


def look(task: str, model_type: str, lora: bool, recipe: str, path: Path) -> None:
    """
    Find out why the layers of a model are no loop and its attention has no kernel, each `None` if they are: as a run on TPU
    decides, of a model of two periods. This process ends before its first step, whose program nobody needs.
    """
    from transformers import TrainerCallback

    from hf_tpu_ext.errors import UserError
    from hf_tpu_ext.layers import splash_attention

    # Heads as narrow as these have no kernel.
    splash_attention.HEAD_DIMS = range(8, 257, 8)
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hf_tpu_ext").addHandler(handler)
    settings, reasons = {"scan_layers": "on", "attention": "splash"}, {}

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainer.compute_loss(trainer.model, trainer._prepare_inputs(next(iter(trainer.get_train_dataloader()))))
            sliced = (line.partition("computed in slices: ")[2].removesuffix(".") for line in lines)
            reasons.setdefault("attention", next(filter(None, sliced), None))
            _finish(path, {"loop": reasons.get("scan_layers"), "kernel": reasons["attention"]})

    while True:
        sizes = dict(ours=True, output_dir=str(path), periods=2)
        try:
            trainer = make_trainer(task, model_type, lora, recipe, **sizes, **settings)
            trainer.add_callback(Look())
            trainer.train()
        except UserError as error:
            refused, _, reason = str(error).partition(" is not possible: ")
            name = refused.partition("=")[0]
            if name not in settings:
                raise
            reasons[name] = reason.partition(". Leave it out")[0]
            del settings[name]


def _tokenizer(size: int, longest: int):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {name: index for index, name in enumerate(["<pad>", "<s>", "</s>", *map(str, range(3, size))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=longest
    )


def _count(trainer) -> dict:
    """What will be known of the steps of a run on XLA."""
    from transformers import TrainerCallback

    found = {"steps": [], "why_traced": None, "fallbacks_of": {}}

    class Count(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainer.backend.wait()
            self.before = trainer.backend.counters()

        def on_step_end(self, args, state, control, **kwargs):
            import torch_xla.debug.metrics as met

            trainer.backend.wait()
            spent = trainer.backend.counters() - self.before
            names = ("compiles", "executions", "reads", "fallbacks", "replays")
            found["steps"].append({name: getattr(spent, name) for name in names})
            compiled = trainer.steps.compiled
            found["why_traced"] = trainer.steps.why_traced if compiled is None else compiled.why_traced
            found["fallbacks_of"] = {name: met.counter_value(name) for name in met.executed_fallback_ops()}

    trainer.add_callback(Count())
    return found


def work(ours: bool, directory: Path, runs: list[list]) -> None:
    """
    Do runs one after the other, each in a fork of this process, which has imported all that they need. The last argument of each
    names its recipes, of which the first that trains counts.
    """
    import peft  # noqa: F401
    import trl
    from transformers import AutoModelForCausalLM, Trainer  # noqa: F401

    import hf_tpu_ext

    _ = trl.SFTTrainer
    if ours:
        _ = hf_tpu_ext.TPUSFTTrainer, hf_tpu_ext.TPUTrainer
    for number, (*run, recipes) in enumerate(runs):
        errors = []
        for recipe in recipes:
            path = directory / f"{number} {recipe}"
            if recipe.endswith(LAYERS):
                call = partial(look, *run, recipe.removesuffix(LAYERS), path)
            else:
                call = partial(train, *run, recipe, ours=ours, output_dir=str(path))
            result = _run_child(path, call)
            if "error" not in result:
                break
            errors.append(result["error"])
        if "error" in result:
            # The first error says more than that of the last resort.
            result["error"] = errors[0]
        (directory / f"{number}.json").write_text(json.dumps(result))


def _run_child(path: Path, call: Callable[[], dict]) -> dict:
    child, begin = os.fork(), time.monotonic()
    if child == 0:
        _run_forked(path, call)
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        time.sleep(0.05)
        if time.monotonic() - begin > MOST_WAITED:
            os.kill(child, signal.SIGKILL)
    result = path.with_suffix(".result")
    if result.exists():
        return json.loads(result.read_text())
    slow = os.waitstatus_to_exitcode(ended[1]) == -signal.SIGXCPU or time.monotonic() - begin > MOST_WAITED
    return {"error": f"no end in {MOST_SECONDS} s" if slow else "the process has died"}


def _run_forked(path: Path, call: Callable[[], dict]) -> None:
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + MOST_SECONDS,) * 2)
    begin = time.process_time()
    try:
        result = call()
    except BaseException as error:
        import traceback

        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        result = {"error": f"{type(error).__name__}: {lines[0]}"[:300], "refused": _is_refused(error)}
    result["cpu_seconds"] = round(time.process_time() - begin, 1)
    _finish(path, result)


def _finish(path: Path, result: dict) -> NoReturn:
    written = path.with_suffix(".partial")
    written.write_text(json.dumps(result))
    written.rename(path.with_suffix(".result"))
    os._exit(0)


def _is_refused(error: BaseException) -> bool:
    return any(cls.__name__ == "UserError" for cls in type(error).__mro__)


# ---- All of them ----


def _start(ours: bool, directory: Path, runs: list[list]) -> list[dict]:
    """Do runs in another process, with upstream's trainers or this package's."""
    env = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    # Compiled in a third of the time, and as exact.
    fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env |= dict(PJRT_DEVICE="CPU", XLA_FLAGS=fast) if ours else dict(USE_TORCH_XLA="0", HF_TPU_EXT="0")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    command = [sys.executable, __file__, "--work", "ours" if ours else "stock", str(directory)]
    subprocess.run(command, input=json.dumps(runs), text=True, env=env, check=True)
    return [json.loads((directory / f"{number}.json").read_text()) for number in range(len(runs))]


def run_part(runs: list[list], directory: Path) -> dict[str, dict]:
    """Results of some runs, by their names."""
    stock = _start(False, directory / "stock", [[*run, TASKS[run[0]].recipes] for run in runs])
    found = {_key(run): {"stock": result} for run, result in zip(runs, stock, strict=True)}
    trained = [run for run in runs if "losses" in found[_key(run)]["stock"]]
    recipes = [[found[_key(run)]["stock"]["recipe"]] for run in trained]
    ours = _start(True, directory / "ours", [[*run, of_run] for run, of_run in zip(trained, recipes, strict=True)])
    for run, of_run, result in zip(trained, recipes, ours, strict=True):
        found[_key(run)]["ours"] = result
        if "losses" in result and not is_equal(found[_key(run)]):
            # Where rounding decides, as in a router, nobody is equal to anybody: who is nearer to exact numbers?
            (exact,) = _start(False, directory / "exact", [[*run, [of_run[0] + EXACTLY]]])
            found[_key(run)]["exact"] = exact
        if "losses" in result and not is_equal(found[_key(run)]):
            # Adam divides a gradient by its size: what is rounding alone moves a weight as far as any other.
            by_sgd = [[*run, [of_run[0] + BY_SGD]]]
            (of_stock,), (of_ours,) = (
                _start(False, directory / "sgd", by_sgd),
                _start(True, directory / "sgd ours", by_sgd),
            )
            found[_key(run)]["by_sgd"] = {"stock": of_stock, "ours": of_ours}
    return found


def compare_loops(runs: list[list], directory: Path) -> dict[str, dict]:
    """
    Results of some runs of two periods of layers, as a loop (`ours`) and unrolled (`stock`), by their names: in float64, but those of
    [`NOT_EXACTLY`].
    """
    known = read_results()
    recipes = [known[_key(run)]["stock"]["recipe"] + ("" if run[1] in NOT_EXACTLY else EXACTLY) for run in runs]
    ways = []
    for way in (LOOPED, UNROLLED):
        of_way = [[*run, [recipe + way]] for run, recipe in zip(runs, recipes, strict=True)]
        ways.append(_start(True, directory / way.strip(), of_way))
    return {_key(run): dict(ours=ours, stock=stock) for run, ours, stock in zip(runs, *ways, strict=True)}


def run_all(
    directory: Path, tasks: list[str], kinds: list[str], only: list[str] | None, again: bool, part: int
) -> None:
    """Do all runs whose results are not known yet, `part` of them at a time."""
    runs = [[task, name, kind == "lora"] for kind in kinds for task in tasks for name in only or names_of(task)]
    if not again:
        known = read_results()
        runs = [run for run in runs if _key(run) not in known]
    for begin in range(0, len(runs), part):
        found = run_part(runs[begin : begin + part], directory)
        _write({**read_results(), **found})
        for key, result in found.items():
            print(key, verdict(result), flush=True)


def look_at_all(directory: Path, only: list[str] | None) -> None:
    """Find out how the layers of causal models run that are trained."""
    runs = {name: ["causal", name, False] for name in only or names_of("causal")}
    recipe_of = {name: read_results()[_key(run)]["stock"].get("recipe") for name, run in runs.items()}
    names = [name for name, recipe in recipe_of.items() if recipe is not None]
    found = _start(True, directory / "layers", [[*runs[name], [recipe_of[name] + LAYERS]] for name in names])
    _write({**read_results(LAYERS_OF), **dict(zip(names, found, strict=True))}, LAYERS_OF)


def read_results(path: Path = RESULTS) -> dict[str, dict]:
    """What is known, by the name of a run, or of a family."""
    return json.loads(path.read_text()) if path.exists() else {}


def _write(known: dict[str, dict], path: Path = RESULTS) -> None:
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known))
    path.write_text(f"{{\n{lines}\n}}\n")


def _key(run: list) -> str:
    task, name, lora = run
    return f"{task}/{name}/{'lora' if lora else 'full'}"


def difference(ours: dict, stock: dict) -> float:
    """The largest relative difference of two runs' losses and norms of gradients."""
    pairs = [pair for name in ("losses", "norms") for pair in zip(ours[name], stock[name], strict=True)]
    return max(abs(mine - other) / max(abs(other), 1e-12) if mine == mine else float("inf") for mine, other in pairs)


def is_equal(result: dict) -> bool:
    """
    Whether our numbers are upstream's to 1e-5, or else as near as those to what upstream computes in float64, or else equal with an
    optimizer that does not make more of rounding.
    """
    ours, stock = result["ours"], result["stock"]
    return difference(ours, stock) <= 1e-5 or is_near_to_exact(result) or is_equal_by_sgd(result)


def is_near_to_exact(result: dict) -> bool:
    """Whether our numbers are as near as upstream's to what upstream computes in float64."""
    exact = result.get("exact", {})
    # Some do not run in float64.
    is_exact = "losses" in exact and difference(result["stock"], exact) < 1e-2
    return is_exact and difference(result["ours"], exact) <= 2 * difference(result["stock"], exact)


def is_equal_by_sgd(result: dict) -> bool:
    """Whether our numbers are upstream's to 1e-5 with SGD in the place of AdamW."""
    runs = result.get("by_sgd", {})
    return all("losses" in run for run in runs.values()) and bool(runs) and difference(**runs) <= 1e-5


def why_not_replayed(ours: dict) -> str | None:
    """Why the last step was traced, or compiled."""
    if ours["why_traced"] is not None or ours["steps"][-1]["replays"] == ACCUMULATION:
        return ours["why_traced"]
    return f"compiled in its steps: {', '.join(str(step['compiles']) for step in ours['steps'])}"


def verdict(result: dict) -> str:
    """One line about a run."""
    stock, ours = result["stock"], result.get("ours")
    if ours is None:
        return f"stock cannot train: {stock['error']}"
    if "error" in ours:
        return f"{'refused' if ours.get('refused') else 'crashes'}: {ours['error']}"
    off, last = difference(ours, stock), ours["steps"][-1]
    said = f"{'equal' if is_equal(result) else 'WRONG'} ({off:.1e}, {ours['recipe']})"
    if (reason := why_not_replayed(ours)) is not None:
        said += f", not replayed: {reason}; {last['executions']} executions, {last['reads']} reads"
    if ours["fallbacks_of"]:
        said += f", on the host: {', '.join(ours['fallbacks_of'])}"
    return f"{said}; {stock['cpu_seconds']} + {ours['cpu_seconds']} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS), help="auto classes, by default all")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS, help="what is trained, by default both")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="families to run, by default all")
    parser.add_argument("--layers", action="store_true", help="find out how layers run, and train nothing")
    parser.add_argument("--again", action="store_true", help="run what is known, too")
    parser.add_argument("--part", type=int, default=16, help="runs after which results are written")
    parser.add_argument("--directory", type=Path, default=Path("/tmp/families"), help="logs of the runs")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        kind, directory = args.work
        work(kind == "ours", Path(directory), json.load(sys.stdin))
    elif args.layers:
        look_at_all(args.directory, args.only)
    else:
        run_all(args.directory, args.task, args.kind, args.only, args.again, args.part)


if __name__ == "__main__":
    main()
