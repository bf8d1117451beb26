"""A model that was trained to be rounded is exported as it was trained; one that was not says what rounding changes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.export.gguf import write_gguf
from hf_tpu_ext.export.make import export_run
from hf_tpu_ext.installing import install_command
from hf_tpu_ext.quantization.fake_quantized import TrainedFor
from hf_tpu_ext.quantization.rounding import SCALES


pytest.importorskip("compressed_tensors")

LORA = dict(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def run_with(fine_tune, tmp_path_factory):
    """Runs of quantization-aware training, each made once."""
    runs = {}

    def run_with(lora=None, **settings):
        key = json.dumps([lora, settings])
        if key not in runs:
            directory = tmp_path_factory.mktemp("runs") / "run"
            peft_config = None if lora is None else LoraConfig(**LORA)
            runs[key] = fine_tune(directory, peft_config, learning_rate=1e-2 if lora else 1e-3, **settings)
        return runs[key]

    return run_with


def rounded_logits(run_dir, logits_of):
    """Those of the model as it was trained."""
    cls = AutoPeftModelForCausalLM if (run_dir / "adapter_config.json").is_file() else AutoModelForCausalLM
    model = cls.from_pretrained(run_dir, dtype=torch.float32)
    with TrainedFor.read(run_dir).fake_quantization(model).enable():
        return logits_of(model)


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def shapes(directory):
    with safe_open(Path(directory) / "model.safetensors", "pt") as file:
        return {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("lora", "settings", "packed"),
    [
        ("inside", dict(qat_weight_dtype="int4"), 8),
        pytest.param(None, dict(qat_weight_dtype="int3", qat_group_size=64), 7, marks=pytest.mark.slow),
        pytest.param(
            None,
            dict(qat_weight_dtype="int2", qat_group_size=16, qat_quantize_embedding=True),
            4,
            marks=pytest.mark.ci,
        ),
        pytest.param(None, dict(qat_weight_dtype="int4", qat_activation_dtype="int8"), None, marks=pytest.mark.ci),
        pytest.param("inside", dict(qat_weight_dtype="int4", qat_scale="mse"), 8, marks=pytest.mark.slow),
        pytest.param(
            None,
            dict(qat_weight_dtype="int2", qat_scale="mse", qat_quantize_embedding=True),
            4,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            None,
            dict(qat_weight_dtype="int3", qat_scale="mse", qat_activation_dtype="int8"),
            None,
            marks=pytest.mark.ci,
        ),
    ],
    ids=["inside", "int3", "embeddings", "activations", "searched", "searched embeddings", "searched activations"],
)
def test_what_is_exported_is_what_was_trained(run_with, logits_of, tmp_path, lora, settings, packed):
    run_dir = run_with(lora, **settings)
    export = export_run(run_dir, tmp_path / "out", merge=lora is not None, dtype="float32", quantize="as trained")
    model = load(export.output_dir)
    trained = rounded_logits(run_dir, logits_of)
    torch.testing.assert_close(logits_of(model), trained, rtol=0, atol=1e-5)
    # An activation between two integers goes by the last bit, which differs from machine to machine.
    assert export.exported.max_abs < 1e-4 or ("qat_activation_dtype" in settings and export.exported.mean_kl < 1e-5)
    assert export.good and "is the trained one" in export.verdict
    assert export.quantized.startswith(settings["qat_weight_dtype"])
    found = shapes(export.output_dir)
    weight = "model.layers.0.mlp.up_proj.weight"
    if packed is None:
        assert found[weight] == ("I8", [128, 64])
    else:
        assert found[f"{weight}_packed"] == ("I32", [128, packed])
    assert found[f"{weight}_scale"] == ("F32", [128, 64 // settings.get("qat_group_size", 32)])
    assert found["model.embed_tokens.weight"][0] == "F32"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_tied_embeddings_are_rounded_once(family, logits_of, tmp_path):
    directory = make_model(tmp_path / "model", family, tie_word_embeddings=True)
    TrainedFor("int3", 16, quantize_embedding=True).write(directory)
    export = export_run(directory, tmp_path / "out", dtype="float32", quantize="as trained")
    assert export.tied and export.exported.max_abs < 1e-5
    trained = rounded_logits(directory, logits_of)
    torch.testing.assert_close(logits_of(load(export.output_dir)), trained, rtol=0, atol=1e-5)
    assert (logits_of(load(directory)) - trained).abs().max() > 1e-2


def test_experts(tmp_path):
    directory = make_model(tmp_path / "model", "mixtral")
    with pytest.raises(
        ValueError, match=r"the experts of this model are none \(model.layers.\*.mlp.experts.down_proj, "
    ):
        export_run(directory, tmp_path / "out", dtype="float32", quantize="int4")
    assert not (tmp_path / "out").exists()


def test_bfloat16(run_with, tmp_path):
    run_dir = run_with("inside", qat_weight_dtype="int4")
    export = export_run(run_dir, tmp_path / "out", merge=True, dtype="bfloat16", quantize="int4")
    assert export.good and "Rounding to bfloat16 changes the model by" in export.verdict
    assert 0 < export.weights.mean_kl < 1e-3
    found = shapes(export.output_dir)
    assert found["model.layers.1.self_attn.q_proj.weight_packed"][0] == "I32"
    assert found["model.layers.1.self_attn.q_proj.weight_scale"][0] == found["lm_head.weight"][0] == "BF16"
    assert export.num_bytes < export.num_parameters * 2


@pytest.mark.ci
def test_the_same_integers_in_every_dtype(run_with, tmp_path):
    run_dir = run_with("inside", qat_weight_dtype="int4")
    files = []
    for dtype in ("float32", "bfloat16", "float16"):
        out = export_run(run_dir, tmp_path / dtype, merge=True, dtype=dtype, quantize="as trained").output_dir
        with safe_open(Path(out) / "model.safetensors", "pt") as file:
            files.append({name: file.get_tensor(name) for name in file.keys() if name.endswith("packed")})  # noqa: SIM118
    assert len(files[0]) == 14
    for other in files[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in files[0].items())


@pytest.mark.ci
def test_searched_scales_are_exact_in_bfloat16(run_with, tmp_path):
    run_dir, files = run_with("inside", qat_weight_dtype="int4", qat_scale="mse"), []
    for dtype in ("float32", "bfloat16"):
        out = export_run(run_dir, tmp_path / dtype, merge=True, dtype=dtype, quantize="as trained").output_dir
        with safe_open(Path(out) / "model.safetensors", "pt") as file:
            files.append({name: file.get_tensor(name) for name in file.keys() if "weight_" in name})  # noqa: SIM118
    scales = [name for name in files[0] if name.endswith("_scale")]
    assert len(scales) == 14 and all((files[0][name] < 0).any() for name in scales)
    assert all(torch.equal(tensor.float(), files[1][name].float()) for name, tensor in files[0].items())


@pytest.mark.ci
def test_a_run_that_was_not_trained_for_it(lora_run, tmp_path, capsys):
    """Few bits change much, and it says so; many change little."""
    argv = ["export", str(lora_run), "--merge", "--quantize", "int2", "--output_dir", str(tmp_path / "int2")]
    assert main(argv) == 1
    shown = capsys.readouterr().out
    assert "Weights of linear layers in int2, groups of 32; " in shown
    assert "Rounding to int2, groups of 32 changes the model by" in shown
    assert "much. Train with qat_weight_dtype, or export more bits: --quantize int8." in shown
    argv = ["export", str(lora_run), "--merge", "--quantize", "int8", "--group_size", "64", "--output_dir"]
    assert main([*argv, str(tmp_path / "int8")]) == 0
    assert "int8, groups of 64" in capsys.readouterr().out
    argv = ["export", str(lora_run), "--merge", "--quantize", "int2", "--scale", "mse", "--output_dir"]
    assert main([*argv, str(tmp_path / "searched")]) == 1
    assert "int2, groups of 32, scales by mse" in capsys.readouterr().out
    largest, searched = (
        json.loads((tmp_path / name / "export.json").read_text())["exported"] for name in ("int2", "searched")
    )
    assert searched["mean_kl"] < 0.7 * largest["mean_kl"]


def test_without_rounding_it_says_that_the_run_was_trained_for_it(run_with, tmp_path, capsys):
    run_dir = run_with("inside", qat_weight_dtype="int4")
    assert main(["export", str(run_dir), "--merge", "--output_dir", str(tmp_path / "out")]) == 0
    assert "The run was trained for int4, groups of 32: add --quantize to" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["", "checkpoint-5"])
def test_what_a_run_was_trained_for_is_beside_its_weights(run_with, place):
    run_dir = run_with("inside", qat_weight_dtype="int4")
    assert TrainedFor.read(run_dir / place) == TrainedFor("int4", 32)


@pytest.mark.parametrize(
    ("run", "argv", "message"),
    [
        (
            "plain",
            ["--quantize"],
            "was not trained for rounded weights (it has no quantization.json). Give what to round to",
        ),
        (
            "plain",
            ["--quantize", "int9"],
            "--quantize int9: weights are rounded to int2, int3, int4, int5, int6, int7, int8",
        ),
        ("plain", ["--group_size", "32"], "--group_size 32 has no effect without --quantize"),
        ("plain", ["--scale", "mse"], "--scale mse has no effect without --quantize"),
        ("plain", ["--quantize", "int4", "--scale", "least"], "--scale least: scales are chosen by max, mse."),
        (
            "plain",
            ["--quantize", "int4", "--group_size", "0"],
            "--group_size 0 is not at least 2. Leave it out for 32",
        ),
        ("plain", ["--quantize", "int4", "--group_size", "48"], "Of an export, it is --group_size."),
        ("plain", ["--quantize", "int4", "--group_size", "128"], "does not divide the 64 inputs of"),
        (
            "inside",
            ["--quantize", "int3"],
            "was trained for int4, groups of 32. Leave the dtype, --group_size and --scale",
        ),
        ("inside", ["--quantize", "--scale", "mse"], "was trained for int4, groups of 32."),
        ("inside", ["--quantize", "--group_size", "16"], "was trained for int4, groups of 32."),
        ("beside", ["--quantize"], "--quantize int4 --group_size 32; or train with qat_adapters='inside'"),
    ],
)
def test_mistakes(lora_run, run_with, tmp_path, capsys, run, argv, message):
    run_dir = lora_run if run == "plain" else run_with(run, qat_weight_dtype="int4", qat_adapters=run)
    assert main(["export", str(run_dir), "--merge", *argv, "--output_dir", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_package_that_is_missing(lora_run, monkeypatch, tmp_path):
    import hf_tpu_ext.export.quantized as quantized

    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(install_command("quantize"))):
        export_run(lora_run, tmp_path / "out", merge=True, quantize="int4")


# ---- llama.cpp ----


@pytest.fixture
def float_gguf(tmp_path):
    """Writes a GGUF file of two matrices of a layer, a norm and the embeddings."""
    gguf = pytest.importorskip("gguf")

    def write(dtype=np.float32, **more):
        rng = np.random.default_rng(0)
        shapes = {"token_embd.weight": (16, 64), "blk.0.attn_q.weight": (64, 64), "blk.0.ffn_down.weight": (64, 128)}
        tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        tensors["blk.0.attn_norm.weight"] = np.ones(64, np.float32)
        tensors |= {name: rng.standard_normal(shape).astype(np.float32) for name, shape in more.items()}
        path = tmp_path / "merged.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_token_list(["a", "b"])
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor.astype(dtype) if tensor.ndim > 1 else tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}

    return write


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("dtype", "kind"), [("int4", "Q4_0"), ("int8", "Q8_0")])
def test_gguf_has_the_integers_of_the_training(float_gguf, lora_run, capsys, dtype, kind, scale):
    from gguf import GGUFReader
    from gguf.quants import dequantize

    path, weights = float_gguf()
    assert main(["export", str(lora_run), "--quantize", dtype, "--scale", scale, "--gguf", str(path)]) == 0
    written = path.with_name(f"merged.{kind}.gguf")
    assert main(["export", str(lora_run), "--quantize", dtype, "--gguf", str(path)]) == 2
    assert f"{written} is there already. Add --overwrite" in capsys.readouterr().err
    command = ["export", str(lora_run), "--quantize", dtype, "--scale", scale, "--gguf", str(path), "--overwrite"]
    assert main(command) == 0
    trained_for = TrainedFor(dtype, scale=scale)
    assert f"2 matrices in {trained_for.describe()}, as {kind}; " in capsys.readouterr().out
    reader = GGUFReader(written)
    found = {tensor.name: tensor for tensor in reader.tensors}
    rounding = trained_for.rounding()
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
        assert found[name].tensor_type.name == kind
        read = torch.from_numpy(dequantize(found[name].data, found[name].tensor_type))
        integers, scales = rounding.quantize_weight(weights[name])
        expected = (integers.unflatten(-1, (-1, 32)) * scales.half().float()[..., None]).flatten(-2)
        assert torch.equal(read, expected)
        torch.testing.assert_close(read, rounding.round_weight(weights[name]), rtol=2**-11, atol=0)
    assert found["token_embd.weight"].tensor_type.name == "F16"
    assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert reader.get_field("tokenizer.ggml.tokens").contents() == ["a", "b"]
    assert reader.get_field("general.file_type").contents() == {"Q4_0": 2, "Q8_0": 7}[kind]


def test_gguf_leaves_a_convolution_as_training_did_and_refuses_experts(float_gguf):
    from gguf import GGUFReader

    path, _ = float_gguf(**{"blk.0.shortconv.conv.weight": (64, 3)})
    export = write_gguf(path, TrainedFor("int4"))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(export.path).tensors}
    assert export.tensors == 2 and kinds["blk.0.shortconv.conv.weight"] == "F16"
    experts = {"blk.0.ffn_gate_inp.weight": (4, 64), "blk.0.ffn_up_exps.weight": (4, 64, 64)}
    path, _ = float_gguf(**experts)
    with pytest.raises(ValueError, match=r"has experts \(blk.0.ffn_up_exps.weight\), which are no linear layers"):
        write_gguf(path, TrainedFor("int4"), overwrite=True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--quantize", "int3", "--gguf", "{file}"],
            "llama.cpp has no type for int3, groups of 32: its types are int4 and",
        ),
        (
            ["--quantize", "int4", "--group_size", "64", "--gguf", "{file}"],
            "llama.cpp has no type for int4, groups of 64:",
        ),
        (
            ["--quantize", "int4", "--gguf", "{file}.not"],
            "there is no such file. Make it of the merged model by llama.cpp",
        ),
        (
            ["--quantize", "int4", "--gguf", "{file}"],
            "has blk.0.attn_q.weight in F16. Other integers than those of the",
        ),
        (
            ["--gguf", "{file}"],
            "--gguf rounds the weights of a GGUF file that is there, and needs --quantize. Add --quantize. For a GGUF file without",
        ),
        (["--quantize", "int4", "--merge", "--gguf", "{file}"], "--merge has no effect on --gguf"),
    ],
)
def test_mistakes_with_gguf(float_gguf, lora_run, capsys, argv, message):
    path, _ = float_gguf(np.float16)
    assert main(["export", str(lora_run), *(word.format(file=path) for word in argv)]) == 2
    assert message in capsys.readouterr().err
    assert [file.name for file in path.parent.iterdir()] == ["merged.gguf"]
