"""Runs to export: trained for a few steps, on eager CPU."""

import pytest
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.examples.tiny import make_arithmetic, make_model


@pytest.fixture(scope="session", autouse=True)
def started(xla):
    """XLA, on which some of these train, is started before the first backward pass of the process."""


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="session")
def train_with(base):
    """Trains the base with a trainer, and gives the directory of the run."""

    def train_with(trainer_cls, config_cls, data, output_dir, peft_config=None, **settings):
        args = config_cls(
            str(output_dir),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            run_report=False,
            disable_tqdm=True,
            **settings,
        )
        trainer = trainer_cls(
            str(base), args, train_dataset=load_dataset(str(data), split="train"), peft_config=peft_config
        )
        trainer.train()
        trainer.save_model()
        return output_dir

    return train_with


@pytest.fixture(scope="session")
def fine_tune(base, train_with):
    def fine_tune(output_dir, peft_config=None, **settings):
        data = make_arithmetic(base.parent / "data", 64)
        settings |= {"max_length": 64, "max_steps": 10, "save_steps": 5}
        return train_with(TPUSFTTrainer, TPUSFTConfig, data, output_dir, peft_config, **settings)

    return fine_tune


@pytest.fixture(scope="session")
def lora_run(fine_tune, tmp_path_factory):
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return fine_tune(tmp_path_factory.mktemp("runs") / "lora", lora, learning_rate=1e-2)


@pytest.fixture(scope="session")
def full_run(fine_tune, tmp_path_factory):
    return fine_tune(tmp_path_factory.mktemp("runs") / "full", learning_rate=1e-3)


@pytest.fixture
def logits_of():
    """Runs a model on tokens of every kind."""

    def run(model):
        with torch.no_grad():
            return model.eval()(input_ids=torch.arange(0, 258, 3)[None]).logits

    return run


@pytest.fixture
def make_adapter(base, logits_of, tmp_path):
    """Make an adapter of random weights on a base."""

    def make(scale=0.1, tied=False, model_type="qwen3", **settings):
        directory = base
        if tied or model_type != "qwen3":
            directory = make_model(tmp_path / "base", model_type, tie_word_embeddings=tied)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(scale * torch.randn_like(parameter))
        run_dir = tmp_path / "run"
        model.save_pretrained(run_dir)
        AutoTokenizer.from_pretrained(directory).save_pretrained(run_dir)
        return run_dir, logits_of(model)

    return make
