"""
What the package relies on in the arguments of transformers and TRL, and in TRL's script: defaults that it replaces, fields
that it sets, names that it looks up. A release that moves one of them fails here, with the file that has to follow.
"""

import ast
import importlib
import importlib.util
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from packaging.version import Version
from transformers import Trainer, TrainingArguments, training_args
from transformers.training_args import OptimizerNames
from trl import SFTConfig

from hf_tpu_ext.cli.swap import TRAINERS
from hf_tpu_ext.cli.trl_scripts import SCRIPTS
from hf_tpu_ext.generation import sampling
from hf_tpu_ext.trainers.checks import adaptations
from hf_tpu_ext.trainers.set_up import bind_device


def parameters(function):
    return list(inspect.signature(function).parameters)


# ---- Settings of a generation ----


def test_settings_that_make_processors_of_logits():
    """Each is refused, or runs on the device within a loop."""
    run = "do_sample epsilon_cutoff min_new_tokens min_p renormalize_logits repetition_penalty suppress_tokens temperature top_k top_p"
    read_elsewhere = "_eos_token_tensor max_length num_beams num_return_sequences use_cache"
    source = inspect.getsource(transformers.GenerationMixin._get_logits_processor)
    named = set(re.findall(r"generation_config\.(\w+)", source))
    allowed = {*run.split(), *read_elsewhere.split()}
    # What else versions read differs.
    assert {*run.split()} <= named - sampling._REFUSED.keys() <= allowed


# ---- Arguments ----


def test_defaults_that_are_replaced(stock):
    config = SFTConfig(str(stock.output_dir), use_cpu=True)
    expected = {
        "bf16": True,
        "optim": OptimizerNames.ADAMW_TORCH_FUSED,
        "gradient_checkpointing": True,
        "activation_checkpointing": True,
        "max_length": 1024,
        "logging_steps": 10,
        "packing": False,
        "packing_strategy": "bfd",
        "eval_packing": None,
        "padding_free": False,
        "pad_to_multiple_of": None,
        "loss_type": "nll",
        "completion_only_loss": None,
        "activation_offloading": False,
        "average_tokens_across_devices": True,
        "train_sampling_strategy": "random",
        "logging_nan_inf_filter": True,
        "dataloader_num_workers": 0,
        "dataloader_multiprocessing_context": None,
    }
    if Version(transformers.__version__) < Version("5.23"):
        assert "activation_checkpointing" not in vars(config)
        del expected["activation_checkpointing"]
    actual = {name: vars(config)[name] for name in expected}
    assert actual == expected, "TRL's defaults have changed; see trainers/checks/fields.py and docs/"


def test_arguments_that_are_set(stock):
    set_on_copies = assigned_names(adaptations) | assigned_names(bind_device)
    set_on_copies -= {"distributed_state", "_n_gpu", "device"}
    assert {"optim", "bf16", "mixed_precision", "model_init_kwargs"} <= set_on_copies
    there = set(vars(SFTConfig(str(stock.output_dir), use_cpu=True)))
    assert set_on_copies <= there, (
        f"SFTConfig has no {set_on_copies - there} any more; see trainers/checks/adaptations.py"
    )


def assigned_names(code):
    """The attributes that the code of a module or function sets on `args`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(code)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value).endswith("args")
    }


def test_device_is_a_cached_property(stock):
    config = stock.config()
    assert "_setup_devices" in vars(config), "TrainingArguments no longer takes the device when it is made"
    vars(config)["_setup_devices"] = torch.device("meta")
    assert config.device.type == "meta", "trainers/set_up.py"
    config._n_gpu = 0
    assert (config.n_gpu, config.world_size, config.train_batch_size) == (0, 1, 2)
    del vars(config)["_setup_devices"]
    assert config.device.type == "cpu", "use_cpu is no longer asked when the device is taken anew"


def test_bf16_is_checked_through_a_name_of_the_module(stock, monkeypatch):
    """backends/selection.py answers for upstream, so that TRL's default is accepted without a GPU."""
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: False)
    with pytest.raises(ValueError, match="bf16"):
        stock.config(bf16=True, use_cpu=False)
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
    assert stock.config(bf16=True, use_cpu=False).mixed_precision == "bf16"


def test_optimizer_names():
    names = adaptations.ADAMW_NAMES | adaptations.HOST_SCALAR_NAMES
    assert all(OptimizerNames(name.value) is name for name in names)
    config = TrainingArguments("unused", use_cpu=True, optim="adamw_torch", learning_rate=3e-4, adam_beta2=0.95)
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(config, None)
    assert cls is torch.optim.AdamW, "trainers/set_up.py, _choose_optimizer"
    assert kwargs == {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8}


# ---- The command line ----


@pytest.mark.parametrize(("command", "trainer"), TRAINERS.items())
def test_script_and_parser(command, trainer, stock, tmp_path, monkeypatch):
    """cli/trl_scripts.py runs TRL's scripts with another trainer in the place where the script looks for it."""
    script = importlib.import_module(f"trl.scripts.{command}")

    assert parameters(script.main) == ["script_args", "training_args", "model_args", "dataset_args"]
    assert parameters(script.make_parser) == ["subparsers", "prog"]
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    given = {}

    class Trainer:
        def __init__(self, **kwargs):
            given.update(kwargs)
            self.accelerator = SimpleNamespace(print=print)

        def train(self, resume_from_checkpoint):
            given["resume_from_checkpoint"] = resume_from_checkpoint

        def save_model(self, output_dir):
            given["output_dir"] = output_dir

        def end(self):
            pass

    monkeypatch.setattr(trl, trainer, Trainer)
    rewards = SCRIPTS[command].rewards
    script_cls = vars(script)[f"{command.upper()}ScriptArguments"] if rewards else trl.ScriptArguments
    config = stock.config()
    config.trust_remote_code = False
    if command == "distillation":
        config.teacher_model_name_or_path, config.teacher_model_revision = "teacher", None
        config.teacher_model_init_kwargs = None
    script.main(
        script_cls(dataset_name=str(tmp_path), **({"reward_funcs": ["accuracy_reward"]} if rewards else {})),
        config,
        trl.ModelConfig(model_name_or_path="model"),
        trl.DatasetMixtureConfig(),
    )
    assert set(given) == {
        "model",
        "args",
        "train_dataset",
        "eval_dataset",
        "quantization_config",
        "peft_config",
        "resume_from_checkpoint",
        "output_dir",
        *(["reward_funcs"] if rewards else []),
        *(["teacher_model"] if command == "distillation" else []),
    }


def test_modules_that_the_command_line_hooks_into():
    assert importlib.util.find_spec("trl.cli.main"), "it has moved; see cli/autoload.py"
    for command, trainer in TRAINERS.items():
        module = f"trl.trainer.{command}_trainer"
        assert getattr(trl, trainer).__module__ == module, "cli/autoload.py swaps it where it is defined"


def test_optimizers_of_bitsandbytes():
    trainer_optimizer = pytest.importorskip("transformers.trainer_optimizer", reason="the module is newer")
    begin = adaptations._OF_BITSANDBYTES
    assert {name for name in OptimizerNames if name.value.startswith(begin)} == {
        *trainer_optimizer._BITSANDBYTES_OPTIMIZERS
    }
