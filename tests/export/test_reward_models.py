"""A reward model is exported with its head, and its scores are those of the trained model."""

import json

import pytest
import torch
from fixes import assert_fixes
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_tpu_ext import TPURewardConfig, TPURewardTrainer
from hf_tpu_ext.cli.main import main
from hf_tpu_ext.examples.tiny import make_model, make_preferences
from hf_tpu_ext.export.make import export_run
from hf_tpu_ext.export.proof import ANSWERS


LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="SEQ_CLS")


@pytest.fixture(scope="module")
def train(base, train_with):
    def train(output_dir, peft_config=None):
        settings = {"max_length": 96, "max_steps": 6, "learning_rate": 1e-2 if peft_config else 1e-3}
        data = make_preferences(base.parent / "preferences", 64)
        return train_with(TPURewardTrainer, TPURewardConfig, data, output_dir, peft_config, **settings)

    return train


@pytest.fixture(scope="module")
def lora_run(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("rewards") / "lora", LORA)


def scores_of(model):
    rows = torch.arange(0, 256).view(8, 32)
    with torch.no_grad():
        return model.eval()(input_ids=rows).logits


def load(directory):
    """As others load it: without the number of labels."""
    return AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.ci
def test_a_merged_reward_model_is_the_trained_one(lora_run, base, capsys):
    assert main(["export", str(lora_run), "--merge"]) == 0
    told = capsys.readouterr()
    # Of the base's head, which is not there, nothing need be said.
    assert "MISSING" not in told.out + told.err and "newly initialized" not in told.out + told.err
    for line in (
        "24 pairs of answers",
        "same choice",
        "Load it with AutoModelForSequenceClassification.",
        "The base is the one of the training: ",
        "is the trained one",
    ):
        assert line in told.out
    trained = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=1), lora_run
    )
    scores = scores_of(trained)
    assert scores.shape == (8, 1)
    torch.testing.assert_close(scores_of(load(lora_run / "merged")), scores, atol=1e-5, rtol=0)
    # The test would pass for an adapter that does nothing.
    with trained.disable_adapter():
        assert (scores_of(trained) - scores).abs().max() > 0.01
    report = json.loads((lora_run / "merged" / "export.json").read_text())
    assert report["auto_class"] == "AutoModelForSequenceClassification" and report["same_base"]
    assert report["exported"]["max_abs"] < 1e-5 < 1e-3 < report["training"]["max_abs"]
    assert report["scores"]["exported"] == pytest.approx(report["scores"]["trained"], abs=1e-5)


def test_a_trained_reward_model_is_converted(train, tmp_path):
    run_dir = train(tmp_path / "full")
    export = export_run(run_dir, dtype="bfloat16")
    assert export.good and 0 < export.exported.max_abs < 0.05
    trained, written = load(run_dir), load(export.output_dir)
    assert written.config.num_labels == 1 and written.config.pad_token_id == trained.config.pad_token_id
    expected = {name: weight.bfloat16().float() for name, weight in trained.state_dict().items()}
    torch.testing.assert_close(written.state_dict(), expected, rtol=0, atol=0)
    assert "score.weight" in expected
    # What a checkpoint has lost is not made up.
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(ValueError, match="has no weights for lm_head.weight. Take another checkpoint"):
        export_run(run_dir, tmp_path / "other", dtype="bfloat16")
    assert not (tmp_path / "other").exists()


@pytest.mark.filterwarnings("ignore:Model (with|has) `tie_word_embeddings=True`")
@pytest.mark.parametrize("task_type", ["SEQ_CLS", None])
def test_an_adapter_on_a_reward_model(base, tmp_path, task_type):
    """Its base has a head, ties its embeddings, and the adapter need not say what it is for."""
    base = make_model(tmp_path / "causal", tie_word_embeddings=True)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "run")
    model.name_or_path = model.config._name_or_path = str(tmp_path / "base")
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "embed_tokens"], task_type=task_type))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "run")
    export = export_run(tmp_path / "run", merge=True, prompts=["1+1?"])
    assert export.good and not export.untied and export.positions == len(ANSWERS) * (len(ANSWERS) - 1) / 2
    torch.testing.assert_close(scores_of(load(export.output_dir)), scores_of(model), atol=1e-5, rtol=0)


def test_a_head_that_was_not_kept_is_told(base, tmp_path):
    """Without a task, PEFT saves no head; the next one to load the adapter would draw another."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "run")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "run")
    with pytest.raises(ValueError, match=r"Neither .* has weights for score\.weight\. .*lora_task_type: SEQ_CLS"):
        export_run(tmp_path / "run", merge=True)


def test_a_classifier_is_no_reward_model(base, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model.save_pretrained(tmp_path / "run")
    with pytest.raises(ValueError, match="is a classifier of 3 labels. Causal language models and reward models"):
        export_run(tmp_path / "run", dtype="bfloat16")


def test_without_a_chat_template(lora_run, base, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (run_dir / name).write_bytes((lora_run / name).read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(run_dir)
    export = export_run(run_dir, merge=True, prompts=["1+1?", "2+2?"])
    assert export.good and export.positions == 12


def test_a_reward_model_is_not_rounded(lora_run, tmp_path):
    def export(**options):
        export_run(lora_run, tmp_path / "export", merge=True, **options)

    assert_fixes(export, {"quantize": "int4"}, "Leave it out")
