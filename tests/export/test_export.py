"""An exported model is the trained one, or says that it is not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, BitsAndBytesConfig, GenerationConfig

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.cli.main import main
from hf_tpu_ext.examples.tiny import make_arithmetic, make_model
from hf_tpu_ext.examples.tiny_vision import make_vision_model
from hf_tpu_ext.export.make import export_run
from hf_tpu_ext.trainers.checkpoint.base_record import BASE_FILE


def load(export):
    return AutoModelForCausalLM.from_pretrained(export.output_dir).eval()


def dtypes(directory):
    with safe_open(Path(directory) / "model.safetensors", "pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("checkpoint", ["", "checkpoint-5"])
def test_merged_model_is_the_trained_one(logits_of, lora_run, base, checkpoint, tmp_path):
    run_dir = lora_run / checkpoint
    export = export_run(run_dir, tmp_path / "merged", merge=True)
    trained = logits_of(AutoPeftModelForCausalLM.from_pretrained(run_dir))
    torch.testing.assert_close(logits_of(load(export)), trained, atol=1e-4, rtol=0)
    # The test would pass for an adapter that does nothing.
    assert (logits_of(AutoModelForCausalLM.from_pretrained(base)) - trained).abs().max() > 0.1
    assert export.good
    assert export.dtype == "float32"  # the base's
    assert export.exported.max_abs < 1e-4
    assert export.exported.same_top1 == 1
    assert export.training.mean_kl > 1e-3


def test_exported_files(lora_run, tmp_path):
    export = export_run(lora_run, tmp_path / "merged", merge=True, dtype="bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
    files = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= files
    assert not any(name.startswith("adapter") for name in files)
    assert dtypes(export.output_dir) == {"BF16"}
    assert load(export).dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(export.output_dir)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(lora_run).chat_template
    assert GenerationConfig.from_pretrained(export.output_dir).eos_token_id == tokenizer.eos_token_id
    report = json.loads((tmp_path / "merged" / "export.json").read_text())
    assert report["exported"]["max_abs"] == export.exported.max_abs > export.weights.max_abs > 0
    assert report["verdict"].startswith("Rounding to bfloat16")


def test_card_of_a_merged_model(lora_run, tmp_path):
    adapter = ModelCard.load(lora_run / "README.md")
    assert adapter.data.library_name == "peft" and "lora" in adapter.data.tags
    export_run(lora_run / "checkpoint-5", tmp_path / "merged", merge=True)
    card = ModelCard.load(tmp_path / "merged" / "README.md")
    assert card.data.library_name == "transformers" and card.data.base_model == adapter.data.base_model
    # As the card of a model that was fine-tuned without an adapter.
    assert card.data.tags == ["hf_tpu_ext", "sft", "transformers", "trl"]
    assert f'model="{tmp_path / "merged"}"' in card.text and "(report.md)" not in card.text
    assert "Exported by `hf-tpu export`, merged into its base, with float32 weights." in card.text
    report = json.loads((tmp_path / "merged" / "export.json").read_text())
    assert "README.md" in report["files"] and report["verdict"] in card.text


def test_full_model_is_converted(full_run):
    export = export_run(full_run, dtype="float16")
    assert export.output_dir == str(full_run / "converted")
    assert export.good
    assert dtypes(export.output_dir) == {"F16"}
    trained = load_file(full_run / "model.safetensors")
    written = load_file(full_run / "converted" / "model.safetensors")
    assert trained.keys() == written.keys()
    assert all(torch.equal(trained[name].half(), written[name]) for name in trained)


@pytest.mark.filterwarnings("ignore:Model (with|has) `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("settings", "stays_tied"),
    [
        ({"target_modules": ["q_proj"]}, True),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"target_modules": ["q_proj", "lm_head"]}, False),
        ({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}, True),
        ({"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [3]}}, False),
        ({"target_modules": ["q_proj"], "use_dora": True}, True),
    ],
)
def test_tied_embeddings(logits_of, make_adapter, settings, stays_tied, tmp_path):
    run_dir, trained = make_adapter(tied=True, **settings)
    export = export_run(run_dir, merge=True)
    model = load(export)
    torch.testing.assert_close(logits_of(model), trained, atol=1e-4, rtol=0)
    assert export.good
    assert model.config.tie_word_embeddings == export.tied == stays_tied
    assert export.untied != stays_tied
    assert ("lm_head.weight" in load_file(Path(export.output_dir) / "model.safetensors")) != stays_tied


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_neox", "mixtral", "phi3"])
def test_families(make_adapter, logits_of, model_type):
    run_dir, trained = make_adapter(scale=0.05, model_type=model_type, target_modules="all-linear")
    export = export_run(run_dir, merge=True, prompts=["1+1?"])
    torch.testing.assert_close(logits_of(load(export)), trained, atol=1e-4, rtol=0)
    assert export.good


@pytest.mark.ci
def test_a_model_of_images_keeps_its_processor(tmp_path):
    source = make_vision_model(tmp_path / "run", "gemma3")
    export = export_run(source, tmp_path / "out", dtype="bfloat16")
    before, after = (AutoProcessor.from_pretrained(directory) for directory in (source, tmp_path / "out"))
    assert export.good and type(after) is type(before)
    assert after.image_processor.to_dict() == before.image_processor.to_dict()
    (source / "processor_config.json").unlink()
    export = export_run(source, tmp_path / "text", dtype="bfloat16")
    assert export.good and not (tmp_path / "text" / "processor_config.json").exists()


def test_the_export_stops_where_the_run_has_learnt_to(make_adapter, tmp_path):
    run_dir, _ = make_adapter(model_type="llama")
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / "base" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 5}))
    export = export_run(run_dir, merge=True, prompts=["1+1?"])
    end = AutoTokenizer.from_pretrained(run_dir).eos_token_id
    assert load(export).config.eos_token_id == end
    stops = GenerationConfig.from_pretrained(export.output_dir).eos_token_id
    assert end in (stops if isinstance(stops, list) else [stops])


def test_tokens_that_the_run_has_added(logits_of, base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<think>", "</think>"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", modules_to_save=["embed_tokens", "lm_head"]))
    model.save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    export = export_run(tmp_path / "run", merge=True)
    torch.testing.assert_close(logits_of(load(export)), logits_of(model), atol=1e-4, rtol=0)
    assert load(export).get_input_embeddings().weight.shape[0] == len(tokenizer)


def test_rounding_away_the_training_is_told(make_adapter):
    run_dir, _ = make_adapter(scale=1e-3, target_modules=["q_proj"])
    export = export_run(run_dir, merge=True, dtype="bfloat16")
    assert not export.good
    assert "of what training changed: much. Export with --dtype float32" in export.verdict
    assert export_run(run_dir, merge=True, dtype="float32", overwrite=True).good


def test_adapter_that_changes_nothing_is_told(lora_run, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in ("adapter_config.json", "tokenizer.json", "tokenizer_config.json"):
        (run_dir / name).write_bytes((lora_run / name).read_bytes())
    weights = load_file(lora_run / "adapter_model.safetensors")
    save_file({f"other.{name}": value for name, value in weights.items()}, run_dir / "adapter_model.safetensors")
    with pytest.warns(UserWarning, match="missing adapter keys"):
        export = export_run(run_dir, merge=True)
    assert not export.good
    assert export.verdict.startswith("The adapter changes nothing")
    assert "it trains tokens that no prompt has" in export.verdict


@pytest.mark.parametrize("init_lora_weights", [True, "pissa"])
def test_what_training_changed_is_beside_the_model_that_it_began_with(make_adapter, init_lora_weights):
    """With PiSSA, the base without its adapter is another model."""
    run_dir, _ = make_adapter(scale=0.01, init_lora_weights=init_lora_weights)
    export = export_run(run_dir, merge=True)
    assert export.good and (export.training is None) == (init_lora_weights == "pissa")


def test_the_phases_are_shown(lora_run, tmp_path, capsys):
    """A model of some size takes minutes."""
    assert main(["export", str(lora_run), "--merge", "--dtype", "float32", "--output_dir", str(tmp_path / "out")]) == 0
    error = capsys.readouterr().err
    phases = ("reading what", "computing with the trained", "writing:", "computing with what was written")
    assert sorted(phases, key=error.find) == [*phases] and all(phase in error for phase in phases)


def test_another_base_is_told(lora_run, base, tmp_path, capsys):
    other = make_model(tmp_path / "other", seed=1)
    command = ["export", str(lora_run), "--merge", "--prompts", "1+1?", "--output_dir"]
    assert main([*command, str(tmp_path / "a"), "--base_model", str(other)]) == 1
    told = capsys.readouterr().out
    assert f"{other} is not the base that the adapter was trained on: " in told and "weights differ" in told
    assert f"Give the base of the training, {base} as it was then: --base_model DIRECTORY" in told
    assert "is the trained one" not in told
    assert json.loads((tmp_path / "a" / "export.json").read_text())["same_base"] is False
    # The same base elsewhere.
    moved = shutil.copytree(base, tmp_path / "moved")
    assert main([*command, str(tmp_path / "b"), "--base_model", str(moved)]) == 0
    told = capsys.readouterr().out
    assert "The base is the one of the training: " in told and "is the trained one" in told


def test_a_base_that_was_not_noted_is_told(make_adapter, capsys):
    run_dir, _ = make_adapter(target_modules=["q_proj"])
    assert main(["export", str(run_dir), "--merge", "--prompts", "1+1?"]) == 0
    told = capsys.readouterr().out
    assert "is the base that the adapter was trained on could not be verified" in told and "base_model.json" in told


def test_prompts_of_the_caller_are_compared(lora_run, tmp_path):
    export = export_run(lora_run, tmp_path / "merged", merge=True, prompts=["1+1?"])
    assert export.prompts == 1
    assert export.positions < 64


def test_tokenizer_of_the_base_where_the_run_has_none(lora_run, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (run_dir / name).write_bytes((lora_run / name).read_bytes())
    export = export_run(run_dir, merge=True)
    assert (Path(export.output_dir) / "chat_template.jinja").is_file()


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.ci), True], ids=["full", "lora"])
def test_the_average_of_a_run(fine_tune, logits_of, tmp_path, lora):
    config = None
    if lora:
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    run_dir = fine_tune(tmp_path / "run", config, learning_rate=1e-2, ema_decay=0.8, max_steps=5)
    load_class = AutoPeftModelForCausalLM if lora else AutoModelForCausalLM
    model = (
        load_class.from_pretrained(run_dir / "checkpoint-5", is_trainable=True)
        if lora
        else load_class.from_pretrained(run_dir)
    )
    of_weights = logits_of(model)
    # As it would be loaded without this package.
    averages = load_file(run_dir / "ema.safetensors")
    assert averages.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.load_state_dict(averages, strict=False)
    of_average = logits_of(model)
    assert (of_average - of_weights).abs().max() > 0.1
    assert main(["export", str(run_dir), "--ema", *(["--merge"] if lora else [])]) == 0
    output_dir = run_dir / ("merged-ema" if lora else "converted-ema")
    torch.testing.assert_close(
        logits_of(AutoModelForCausalLM.from_pretrained(output_dir)), of_average, rtol=0, atol=1e-4 if lora else 0
    )
    assert json.loads((output_dir / "export.json").read_text())["ema"] is True


@pytest.mark.ci
def test_merge_of_a_qlora_run_is_the_trained_model(base, xla, logits_of, tmp_path):
    """The base is quantized again as it was in training. The adapter on the original weights is another model."""
    data = make_arithmetic(tmp_path / "data", 64)
    args = TPUSFTConfig(
        str(tmp_path / "run"),
        backend="xla",
        bf16=False,
        max_length=64,
        max_steps=4,
        learning_rate=1e-2,
        report_to="none",
        run_report=False,
        disable_tqdm=True,
    )
    trainer = TPUSFTTrainer(
        str(base),
        args,
        train_dataset=load_dataset(str(data), split="train"),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
    )
    trainer.train()
    trainer.save_model()
    ids = torch.arange(0, 258, 3)[None]
    with torch.no_grad():
        trained = trainer.model.eval()(input_ids=ids.to(xla.device)).logits.cpu()
    export = export_run(tmp_path / "run", merge=True, dtype="float32")
    select_backend("xla")
    assert export.good
    assert export.same_base
    merged = AutoModelForCausalLM.from_pretrained(export.output_dir)
    assert "quantization_config" not in vars(merged.config)
    # TRL's adapters are bfloat16, and so is what is computed with them in training.
    torch.testing.assert_close(logits_of(merged), trained, rtol=0, atol=2e-2)
    noted = tmp_path / "run" / BASE_FILE
    noted.write_text(json.dumps(json.loads(noted.read_text()) | {"quantization": None}))
    export_run(tmp_path / "run", tmp_path / "original", merge=True, dtype="float32")
    select_backend("xla")
    original = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "original"))
    assert (original - trained).abs().max() > 5 * (logits_of(merged) - trained).abs().max()
