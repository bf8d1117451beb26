"""Exports that a message refuses are written once the command is typed as the message says."""

import re
import shutil

import pytest
import torch
from fixes import assert_fixes, refusal
from full_disk import largest_file
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_tpu_ext.errors import SaveError
from hf_tpu_ext.export import gguf
from hf_tpu_ext.export.files import whole_directory
from hf_tpu_ext.export.make import export_run
from hf_tpu_ext.export.models import open_source
from hf_tpu_ext.export.quantized import choose_quantization
from hf_tpu_ext.quantization.fake_quantized import TrainedFor


@pytest.fixture
def export(tmp_path):
    """Exports a run with options, into a new directory each time."""

    def export(run, **options):
        options = {name.replace("-", "_"): value for name, value in options.items()}
        shutil.rmtree(tmp_path / "export", ignore_errors=True)
        return export_run(run, tmp_path / "export", prompts=["1+1?"], **options)

    return export


@pytest.mark.parametrize(
    ("kind", "options", "fixes"),
    [
        ("lora", {}, ["Add --merge."]),
        ("full", {"merge": True, "dtype": "bfloat16"}, ["Leave out --merge."]),
        ("full", {"base_model": "other", "dtype": "bfloat16"}, ["Leave out --base_model."]),
        ("full", {}, ["--dtype bfloat16"]),
        ("full", {"scale": "mse", "dtype": "bfloat16"}, ["leave --scale out"]),
    ],
    ids=str,
)
def test_options(lora_run, full_run, export, kind, options, fixes):
    run = lora_run if kind == "lora" else full_run
    assert_fixes(lambda **options: export(run, **options), options, *fixes)


def test_dtypes(full_run, export):
    message = refusal(lambda **options: export(full_run, **options), {"dtype": "int8"})
    for dtype in re.search("weights are written in (.*)\\. Give", message).group(1).split(", "):
        export(full_run, dtype=dtype)


def test_a_base_that_is_not_there(lora_run, base, export):
    options = {"merge": True, "base_model": "absent/model"}
    assert "Say where it is: --base_model DIRECTORY" in refusal(lambda **options: export(lora_run, **options), options)
    export(lora_run, merge=True, base_model=str(base))


def test_weights_that_are_not_there(full_run, tmp_path, export):
    run = shutil.copytree(full_run, tmp_path / "run")
    for path in run.glob("*.safetensors"):
        path.unlink()
    assert "holds no full model. Take another checkpoint" in refusal(lambda: export(run, dtype="bfloat16"), {})
    export(full_run, dtype="bfloat16")


def test_a_tokenizer_that_is_not_there(full_run, tmp_path, export):
    run = shutil.copytree(full_run, tmp_path / "run")
    names = ["tokenizer.json", "tokenizer_config.json"]
    for name in names:
        (run / name).unlink()
    message = refusal(lambda: export(run, dtype="bfloat16"), {})
    assert "No tokenizer is found in" in message and all(name in message for name in names)
    for name in names:
        shutil.copy(full_run / name, run)
    export(run, dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "fixes"),
    [
        ({"quantize": "int9"}, ["int2", "int8"]),
        ({"quantize": "int4", "scale": "mean"}, ["max", "mse"]),
        ({"quantize": "as trained"}, []),
    ],
    ids=str,
)
def test_quantization(tmp_path, options, fixes):
    def check(quantize=None, group_size=None, scale=None):
        return choose_quantization(tmp_path, quantize, group_size, scale)

    message = refusal(check, options)
    *_, name = options
    for value in fixes:
        assert value in message
        check(**{**options, name: value})


def test_quantization_of_a_run_that_was_trained_for_another(tmp_path):
    TrainedFor("int4", 32).write(tmp_path)

    def check(quantize, group_size=None):
        return choose_quantization(tmp_path, quantize, group_size, None)

    assert "Leave the dtype, --group_size and --scale out" in refusal(check, {"quantize": "int8"})
    assert check("int4").weight_dtype == "int4"


def test_a_package_for_gguf(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    message = refusal(lambda: gguf.write_gguf(tmp_path / "a.gguf", TrainedFor("int4", 32)), {})
    assert message.endswith("pip install gguf")


def test_a_file_that_is_no_gguf(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(bytes(64))
    message = refusal(lambda: gguf.write_gguf(tmp_path / "a.gguf", TrainedFor("int4", 32)), {})
    assert f"--gguf {tmp_path / 'a.gguf'} is no GGUF file" in message and "--outtype f32" in message


def test_a_directory_that_is_no_run(full_run, tmp_path):
    def check(run):
        return open_source(run, False, None, False)

    assert "Give the output_dir of a run, or a checkpoint-N in it." in refusal(check, {"run": tmp_path / "absent"})
    check(full_run)
    check(sorted(full_run.glob("checkpoint-*"))[0])


def test_weights_that_a_disk_has_no_room_for(tmp_path):
    def write():
        with whole_directory(tmp_path / "merged") as written:
            save_file({"weight": torch.zeros(1000)}, written / "model.safetensors")

    refused = pytest.raises(SaveError, match="Make room there, or give --output_dir on another disk")
    with largest_file(1000), refused as error:
        write()
    assert str(error.value).startswith(f"{tmp_path / 'merged'} cannot be written: ")
    assert not list(tmp_path.iterdir())
    write()
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("first", ["default", "first"])
def test_several_adapters(base, export, tmp_path, first, caplog):
    """PEFT saves adapters with names of their own into directories of these names."""
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora, adapter_name=first)
    model.add_adapter("second", lora)
    run = tmp_path / "run"
    model.save_pretrained(run)
    AutoTokenizer.from_pretrained(base).save_pretrained(run)
    (run / "checkpoint-1").mkdir()
    shutil.copy(run / "second" / "adapter_config.json", run / "checkpoint-1")
    if first == "default":
        assert export(run, merge=True).output_dir
        assert f"{run} holds second besides the adapter that is exported" in caplog.text
    else:
        assert "It holds checkpoint-1, first, second: give one of these." in refusal(
            export, {"run": run, "merge": True}
        )
    assert export(run / "second", merge=True).output_dir
