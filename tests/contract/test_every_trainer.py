"""Names of this package's and of upstream's in one trainer; and how the losses of TRL's trainers read their metrics."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import transformers
import trl.trainer
from transformers import Trainer

from hf_tpu_ext import TPUGRPOTrainer, TPURLOOTrainer, TPUSFTTrainer, TPUTrainer
from hf_tpu_ext.step.deferred_reads import _branches
from hf_tpu_ext.trainers import TPUTrainerMixin
from hf_tpu_ext.trainers.checks.upstream import _GENERATE
from hf_tpu_ext.trainers.run.metrics import _metrics_of


MODULES = [
    importlib.import_module(f"trl.trainer.{found.name}") for found in pkgutil.iter_modules(trl.trainer.__path__)
]
UPSTREAM = {
    cls
    for module in MODULES
    for cls in vars(module).values()
    if inspect.isclass(cls) and issubclass(cls, Trainer) and cls.__module__ == module.__name__
}
# What this package overrides or sets on purpose.
OVERRIDES = {name for cls in Trainer.__mro__ for name in vars(cls)}


def set_on_self(cls):
    """Names that the methods of a class assign to on `self`."""
    nodes = ast.walk(ast.parse(inspect.getsource(cls)))
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


OURS = {
    cls
    for trainer in (TPUTrainerMixin, TPUSFTTrainer, TPUTrainer)
    for cls in trainer.__mro__
    if cls.__module__.startswith("hf_tpu_ext.")
}
# Of the trainers that write their own data.
ROLLOUTS = {
    cls
    for trainer in (TPUGRPOTrainer, TPURLOOTrainer)
    for cls in trainer.__mro__
    if cls.__module__.startswith("hf_tpu_ext.") and cls not in OURS
}
OF_TRAINER = OVERRIDES | set_on_self(Trainer)


def test_trainers_are_found():
    names = {cls.__name__ for cls in UPSTREAM}
    assert {"SFTTrainer", "RewardTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer"} <= names


@pytest.mark.parametrize("upstream", sorted(UPSTREAM, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_no_hook_has_a_name_of_upstreams(upstream):
    """Of a method of TRL's with the name of a hook, one would be called in place of the other."""
    theirs = (set(vars(upstream)) | set_on_self(upstream)) - OF_TRAINER
    for cls in OURS:
        ours = {name for name in set(vars(cls)) | set_on_self(cls) if not name.startswith("__")}
        meant = {"_total_train_tokens", "_metrics"} | ({"_prepare_dataset"} if cls is TPUSFTTrainer else set())
        assert not (ours - meant) & theirs, f"{cls.__name__} and {upstream.__name__}"


@pytest.mark.parametrize("name, cls", [("cpo", "CPO"), ("orpo", "ORPO"), ("tpo", "TPO")])
def test_metrics_of_experimental_trainers_are_known_by_their_source(name, cls):
    module = importlib.import_module(f"trl.experimental.{name}")
    assert {"rewards/margins", "logps/chosen"} <= _metrics_of(vars(module)[f"{cls}Trainer"])


def test_trainers_that_generate_are_known():
    """Those of `trl.experimental`, too, whose files are found by name: what they import may not be installed."""
    words = re.compile(
        r"^(?:class (\w+Trainer)\(\w+\):|.*\b(?:unwrap_model_for_generation|rollout_worker)\b)", re.MULTILINE
    )
    folder, found = Path(trl.__file__).parent, set()
    for file in [*folder.glob("trainer/*_trainer.py"), *folder.glob("experimental/*/*_trainer.py")]:
        text = file.read_text(encoding="utf-8")
        if any(not match[1] and not match[0].startswith(("import", "from")) for match in words.finditer(text)):
            found |= {match[1] for match in words.finditer(text) if match[1]}
    assert {"GRPOTrainer", "OnlineDPOTrainer", "AsyncGRPOTrainer"} <= found <= _GENERATE


def test_no_two_classes_of_ours_define_a_private_name_twice():
    seen = {}
    for cls in OURS - {TPUSFTTrainer, TPUTrainer}:
        for name in vars(cls):
            if name.startswith("_") and not name.startswith("__") and name not in OVERRIDES and name in seen:
                owners = sorted([seen[name], cls], key=lambda owner: owner.__name__)
                assert any(
                    issubclass(TPUSFTTrainer, owner) and owner.__name__ == "DistillationMixin" for owner in owners
                ), f"{name} of {owners}"
            seen[name] = cls


# What they override of GRPO and RLOO, and set, besides what is the mixin's.
OF_ROLLOUTS = {
    "_calculate_rewards": ["inputs", "prompts", "completions", "completion_ids_list"],
    "_generate_single_turn": ["prompt_ids", "images", "multimodal_fields"],
    "_tokenize_prompts": ["prompts"],
    "_get_per_token_logps_and_entropies": ["model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"],
    "get_high_entropy_mask": ["entropies", "mask", "threshold"],
}
OF_ENTROPY = {"_last_world_entropy", "entropy_coef", "use_adaptive_entropy"}
SET_BY_ROLLOUTS = {"_buffered_inputs", "_logs", "_metrics", "_step", "reward_funcs"}


@pytest.mark.parametrize("upstream", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_rollouts_override_what_is_there(upstream):
    theirs = set(vars(upstream)) | set_on_self(upstream)
    for name, expected in OF_ROLLOUTS.items():
        if name == "get_high_entropy_mask" and upstream is trl.RLOOTrainer:
            continue
        taken = list(inspect.signature(vars(upstream)[name]).parameters)[1:]
        assert taken[: len(expected)] == expected, f"{upstream.__name__}.{name} takes {taken}"
    assert SET_BY_ROLLOUTS <= theirs
    assert upstream is trl.RLOOTrainer or OF_ENTROPY <= theirs
    for cls in ROLLOUTS:
        ours = {name for name in set(vars(cls)) | set_on_self(cls) if not name.startswith("__")}
        assert ours & (theirs - OF_TRAINER) <= OF_ROLLOUTS.keys() | SET_BY_ROLLOUTS | OF_ENTROPY, f"{cls.__name__}"


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_rollouts_replace_what_is_there(name):
    """Functions that a trainer's module is to have by these names; and where batches are prepared, on the host."""
    module = importlib.import_module(f"trl.trainer.{name}_trainer")
    assert {"disable_gradient_checkpointing", "nanmax", "nanmin", "use_adapter"} <= set(vars(module))
    trainer = vars(module)[f"{name.upper()}Trainer"]
    assert "self._prepare_inputs" not in inspect.getsource(trainer._compute_loss)
    assert "_generate_and_score_completions" in inspect.getsource(trainer._prepare_inputs)


@pytest.mark.parametrize("name", ["sft", "reward", "dpo", "kto"])
def test_losses_read_what_is_deferred(name):
    """
    Every condition on metrics in a loss is one that `step/deferred_reads.py` knows: `value if tensor else constant`, or an
    `if` around nothing but metrics.
    """
    module = importlib.import_module(f"trl.trainer.{name}_trainer")
    known = {(branch.test[0], branch.constant is None) for branch in _branches(module.__file__)}
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    losses = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.endswith("compute_loss")
    ]
    assert losses
    counted = 0
    for node in (node for loss in losses for node in ast.walk(loss) if isinstance(node, (ast.If, ast.IfExp))):
        compares = [part for part in ast.walk(node.test) if isinstance(part, ast.Compare)]
        for compare in compares:
            # Such as `total_tokens > 0`: the number comes from the device.
            is_count = isinstance(compare.ops[0], ast.Gt) and ast.unparse(compare.comparators[0]) == "0"
            if is_count:
                assert ((node.test.lineno, node.test.col_offset), isinstance(node, ast.If)) in known, ast.unparse(node)
                counted += 1
    assert counted or name == "reward"


@pytest.mark.parametrize(
    "name, metrics",
    [
        ("SFTTrainer", {"entropy", "mean_token_accuracy", "aux_loss"}),
        ("RewardTrainer", {"min_reward", "mean_reward", "max_reward", "accuracy", "margin"}),
        ("DPOTrainer", {"rewards/margins", "logps/chosen", "entropy"}),
        ("GRPOTrainer", {"kl", "entropy", "clip_ratio/low_min", "cispo_clip_ratio", "vespo/phi_seq_mean"}),
        ("RLOOTrainer", {"entropy", "clip_ratio/high_max"}),
        ("KTOTrainer", {"kl", "rewards/chosen", "logits/rejected"}),
    ],
)
def test_names_of_metrics_are_found_in_the_source(name, metrics):
    assert metrics <= set(_metrics_of(getattr(trl, name)))
    assert list(_metrics_of(transformers.Trainer)) == []
