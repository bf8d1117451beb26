"""`HF_TPU_EXT=1` and a script as it is: which trainers it gets, in any order of imports, and what is said of others."""

import os
import subprocess
import sys

import pytest

from hf_tpu_ext.cli.swap import TRAINERS


CONFIGS = {trainer.replace("Trainer", "Config") for trainer in TRAINERS.values()}
FOUND = """
import sys, trl, trl.trainer
from hf_tpu_ext.cli.swap import _REPLACED
places = [(trl, name) for name in _REPLACED.values()] + [(trl.trainer, name) for name in _REPLACED.values()]
places += [(sys.modules["__main__"], name) for name in _REPLACED.values()]
# The modules that define them; those that a trainer's module has for itself stay.
places += [(sys.modules[module], name) for module, name in _REPLACED.items() if module in sys.modules]
names = [vars(place)[name].__name__ for place, name in places if name in vars(place)]
print(*names)
"""


def run(script, *argv, check=True, **env):
    env = {**os.environ, "HF_TPU_EXT": "1", **env}
    command = [sys.executable, "-W", "ignore", "-c", script, *argv]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert not check or result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize(
    "imports",
    [
        # torch is imported within the module of the trainer.
        pytest.param("from trl import SFTTrainer", marks=pytest.mark.ci),
        pytest.param("from trl import SFTConfig, SFTTrainer", marks=pytest.mark.slow),
        pytest.param("from trl import GRPOTrainer, GRPOConfig", marks=pytest.mark.slow),
        pytest.param("from datasets import load_dataset; from trl import GRPOTrainer", marks=pytest.mark.slow),
        pytest.param("import torch; from trl import DPOTrainer", marks=pytest.mark.slow),
        pytest.param("from trl.trainer.kto_trainer import KTOTrainer", marks=pytest.mark.slow),
        pytest.param("import trl.trainer.reward_trainer; trl.RewardTrainer", marks=pytest.mark.slow),
        pytest.param("from transformers import Trainer; from trl import RLOOTrainer", marks=pytest.mark.slow),
        pytest.param("from trl import DistillationTrainer", marks=pytest.mark.slow),
        pytest.param(
            "from trl.experimental.gmpo import GMPOTrainer; from trl import GRPOTrainer", marks=pytest.mark.slow
        ),
    ],
)
def test_trainers_and_configs_are_ours_in_any_order_of_imports(imports):
    names = run(f"{imports}\n{FOUND}").stdout.split()
    assert {name.removeprefix("TPU") for name in names} == {*TRAINERS.values(), *CONFIGS}
    assert len(names) >= 3 * len(CONFIGS)
    assert all(name.startswith("TPU") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "from hf_tpu_ext import TPUSFTTrainer; from trl import SFTTrainer",
        "import torch; from hf_tpu_ext.trainers import TPUTrainerMixin; from trl import SFTTrainer",
    ],
)
def test_a_script_that_imports_our_trainers_chooses_by_itself(imports):
    names = run(f"{imports}\n{FOUND}").stdout.split()
    assert names and not any(name.startswith("TPU") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "bases", "first"),
    [
        (
            "from trl.experimental.gmpo import GMPOTrainer as G; from hf_tpu_ext import TPUGRPOTrainer as M",
            "M, G",
            "GMPO",
        ),
        (
            "from hf_tpu_ext import TPUGRPOTrainer as M; from trl.experimental.gmpo import GMPOTrainer as G",
            "M, G",
            "TPU",
        ),
        ("from trl import SFTTrainer as G; from hf_tpu_ext.trainers import TPUTrainerMixin as M", "M, G", "TPUSFT"),
        (
            "from trl.experimental.gkd import GKDTrainer as G; from hf_tpu_ext.trainers import TPUTrainerMixin as M",
            "M, G",
            "GKD",
        ),
    ],
)
def test_a_class_over_a_trainer_that_is_replaced_already(imports, bases, first):
    """The classes of the documentation, which have no order of bases where the second derives from the first."""
    script = f"""
{imports}
class T({bases}): ...
from hf_tpu_ext.trainers import TPUTrainerMixin
from hf_tpu_ext.trainers.checks.upstream import upstream_behind, upstream_of
assert issubclass(T, TPUTrainerMixin)
print(T.__mro__[1].__name__, upstream_of(T).__module__.partition(".")[0], upstream_behind(T).__module__.partition(".")[0])
"""
    name, *packages = run(script).stdout.split()
    assert name.startswith(first)
    assert packages == ["trl", "trl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            "from transformers import Trainer as T",
            "Trainer is not replaced under HF_TPU_EXT=1, because only SFTTrainer, DPOTrainer,",
        ),
        ("from trl.experimental.cpo import CPOTrainer as T", "class TPUCPOTrainer(TPUTrainerMixin, CPOTrainer): ..."),
        (
            "import hf_tpu_ext.trainers; from trl import RewardTrainer as T",
            "RewardTrainer is not replaced under HF_TPU_EXT=1, because this script imports hf_tpu_ext itself.",
        ),
        ("from trl import RewardTrainer as T", None),
    ],
)
def test_a_trainer_that_is_not_replaced_says_so(make, line):
    # As each trainer begins with its model, its data and its arguments.
    script = f"""
{make}
from transformers import Trainer
for _ in range(2):
    try: Trainer.__init__(object.__new__(T), model=1)
    except Exception: pass
"""
    said = [text for text in run(script).stderr.splitlines() if "is not replaced" in text]
    assert len(said) == (line is not None)
    assert line is None or line in said[0]


@pytest.mark.slow
def test_an_unedited_script_takes_our_settings(tmp_path):
    script = """
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
_, args, _ = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
print(type(args).__name__, args.length_buckets, args.mesh)
"""
    result = run(script, "--output_dir", str(tmp_path), "--length_buckets", "64", "128", "--mesh", "data")
    assert result.stdout.split("\n")[0] == "TPUSFTConfig [64, 128] data"
