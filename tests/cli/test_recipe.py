"""Reading a recipe: what is taken, and what is said about what is not."""

import pytest
import trl

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.cli.recipe import load_recipe, read_recipe
from hf_tpu_ext.cli.recipe_parser import FOR_PROCESSES_ON_THE_CPU, RecipeParser


DATACLASSES = (trl.ScriptArguments, TPUSFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig)


@pytest.fixture
def parse(tmp_path):
    def parse(text, *argv):
        path = tmp_path / "recipe.yaml"
        path.write_text(f"use_cpu: true\noutput_dir: {tmp_path}/out\n{text}")
        parsed = RecipeParser(DATACLASSES, "sft", "").parse(read_recipe(["--config", str(path), *argv]))
        return {key: value for arguments in parsed for key, value in vars(arguments).items()}

    return parse


@pytest.mark.parametrize(
    ("text", "argv", "key", "value"),
    [
        ("learning_rate: 2e-5", [], "learning_rate", 2e-5),  # a string to YAML
        ("learning_rate: 1", [], "learning_rate", 1.0),
        ("learning_rate: 2e-5", ["--learning_rate", "1e-3"], "learning_rate", 1e-3),
        ("packing: yes", [], "packing", True),
        ("eval_strategy: no", [], "eval_strategy", "no"),  # false to YAML
        ("save_steps: 0.5", [], "save_steps", 0.5),
        ("dataset_name: 12", [], "dataset_name", "12"),
        ("pad_to_multiple_of: 8", [], "pad_to_multiple_of", 8),
        ("lora_target_modules: all-linear", [], "lora_target_modules", "all-linear"),
        ("lora_target_modules: [q_proj, v_proj]", [], "lora_target_modules", ["q_proj", "v_proj"]),
        ("length_buckets: [64, 128]", [], "length_buckets", [64, 128]),
        ("length_buckets: 4", [], "length_buckets", [4]),
        ("", ["--length_buckets", "64", "128"], "length_buckets", [64, 128]),
        ("model_init_kwargs: {use_cache: false}", [], "model_init_kwargs", {"use_cache": False}),
        ("datasets: [{path: a/b}]", [], "datasets", [trl.scripts.utils.DatasetConfig("a/b")]),
        ("save_total_limit: null", [], "save_total_limit", None),
        ("resume_from_checkpoint: true", [], "resume_from_checkpoint", True),
        ("resume_from_checkpoint: false", [], "resume_from_checkpoint", False),
        ("resume_from_checkpoint: runs/checkpoint-4", [], "resume_from_checkpoint", "runs/checkpoint-4"),
        ("", ["--resume_from_checkpoint", "true"], "resume_from_checkpoint", True),
        ("", ["--resume_from_checkpoint", "runs/checkpoint-4"], "resume_from_checkpoint", "runs/checkpoint-4"),
        ("", [], "resume_from_checkpoint", None),
        ("qat: {weight_dtype: int4, group_size: 64}", [], "qat_group_size", 64),
        ("qat: {weight_dtype: int4, scale: mse}", [], "qat_scale", "mse"),
        ("qat: {weight_dtype: int4}\nqat_adapters: beside", [], "qat_adapters", "beside"),
        ("qat: {weight_dtype: int4}", ["--qat_weight_dtype", "int3"], "qat_weight_dtype", "int3"),
        # A boolean to YAML, a word to the key.
        ("scan_layers: on", [], "scan_layers", "on"),
        ("scan_layers: off", [], "scan_layers", "off"),
        ("compile_step: off", [], "compile_step", "off"),
        ("compile_cache_dir: off", [], "compile_cache_dir", "off"),
        ("packing: on", [], "packing", True),
        ("packing: Off", [], "packing", False),
        ("model_init_kwargs: {use_cache: no}", [], "model_init_kwargs", {"use_cache": False}),
        ("include_num_input_tokens_seen: true", [], "include_num_input_tokens_seen", "all"),
        ("", ["--packing"], "packing", True),
        ("packing: true", ["--packing", "false"], "packing", False),
        ("packing: true", ["--packing=no"], "packing", False),
        ("", ["--packing", "1"], "packing", True),
        ("", ["--no_dataloader_pin_memory"], "dataloader_pin_memory", False),
        ("", ["--no-dataloader-pin-memory"], "dataloader_pin_memory", False),
        ("", ["--learning-rate=1e-3"], "learning_rate", 1e-3),
        ("", ["--learning_rate", "1", "--learning_rate", "2"], "learning_rate", 2.0),
        ("", ["--model_init_kwargs", '{"use_cache": false}'], "model_init_kwargs", {"use_cache": False}),
        ("", ["--lora_target_modules", "q_proj", "v_proj"], "lora_target_modules", ["q_proj", "v_proj"]),
    ],
)
def test_values(parse, text, argv, key, value):
    given = parse(text, *argv)[key]
    assert given == value
    assert type(given) is type(value) or key == "eval_strategy"


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        ("lerning_rate: 1e-5", [], "unknown key 'lerning_rate' in {path}. Did you mean 'learning_rate'?"),
        ("learning-rate: 1e-5", [], "unknown key 'learning-rate' in {path}. Did you mean 'learning_rate'?"),
        ("num_proceses: 8", [], "unknown key 'num_proceses' in {path}. Did you mean 'num_processes'?"),
        ("zzzz: 8", [], "unknown key 'zzzz' in {path}. `hf-tpu sft --help` lists the keys."),
        ("", ["--max_prompt_length=8"], "Did you mean 'max_length', which counts prompt and completion?"),
        ("", ["--max-lenght=8"], "unknown key 'max_lenght' on the command line. Did you mean 'max_length'?"),
        ("warmup_ratio: 0.1", [], "Did you mean 'warmup_steps', of which a number below 1 is a share of all steps?"),
        (
            "overwrite_output_dir: true",
            [],
            "unknown key 'overwrite_output_dir' in {path}. It is a key of earlier releases of transformers or TRL, or of another tool: leave it ",
        ),
        ("", ["--torch_dtype", "bfloat16"], "on the command line. Did you mean 'dtype'?"),
        ("", ["--confg", "x"], "unknown key 'confg' on the command line. Did you mean 'config'?"),
        ("", ["--learning_rat", "1"], "unknown key 'learning_rat' on the command line. Did you mean 'learning_rate'?"),
        ("", ["--max_len=8"], "unknown key 'max_len' on the command line. Did you mean 'max_length'?"),
        ("", ["--config"], "command line: --config has no value, expected a path: --config PATH"),
        ("", ["recipe.yaml"], "command line: unexpected 'recipe.yaml'. A recipe is given as: --config recipe.yaml"),
        ("learning_rate: fast", [], "{path}: learning_rate is 'fast', expected float (default: 2e-05)."),
        ("learning_rate: [1, 2]", [], "{path}: learning_rate is [1, 2], expected float (default: 2e-05)."),
        ("max_steps: many", [], "{path}: max_steps is 'many', expected int (default: -1)."),
        ("max_steps: 2.5", [], "{path}: max_steps is 2.5, expected int (default: -1)."),
        ("max_steps: true", [], "{path}: max_steps is 'true', expected int (default: -1)."),
        ("max_steps:", [], "{path}: max_steps is None, expected int (default: -1)."),
        ("packing: maybe", [], "{path}: packing is 'maybe', expected bool (default: False)."),
        ("packing: 3", [], "{path}: packing is 3, expected bool (default: False)."),
        ("length_buckets: [64, many]", [], "{path}: length_buckets is [64, 'many'], expected list[int] | None."),
        ("dtype: float", [], "{path}: dtype is 'float', expected one of auto, bfloat16, float16, float32."),
        (
            "qat: int4",
            [],
            "{path}: qat is 'int4', expected a mapping such as `qat: {{weight_dtype: int4, group_size: 32}}`.",
        ),
        (
            "qat: {{wieght_dtype: int4}}",
            [],
            "unknown key 'qat_wieght_dtype' in {path}. Did you mean 'qat_weight_dtype'?",
        ),
        (
            "qat_group_size: 8\nqat: {{group_size: 4}}",
            [],
            "'group_size' under qat and qat_group_size are the same key.",
        ),
        ("datasets: [{{path: a, nam: b}}]", [], "unexpected keyword argument 'nam'"),
        (
            "on: true",
            [],
            "{path}: the key True is no text. YAML takes on, yes and numbers for other things: put it in quotation",
        ),
        ("1: 2", [], "{path}: the key 1 is no text."),
        ("lr_scheduler_type: cosin", [], "lr_scheduler_type is 'cosin', expected one of linear, cosine"),
        ("", ["--max_steps", "many"], "command line: max_steps is 'many', expected int (default: -1)."),
        ("", ["--max_steps"], "command line: max_steps has no value, expected int (default: -1)."),
        (
            "",
            ["--max_steps", "3", "recipe.yaml"],
            "command line: unexpected 'recipe.yaml'. A recipe is given as: --config recipe.yaml",
        ),
        (
            "",
            ["--dtype", "float"],
            "command line: dtype is 'float', expected one of auto, bfloat16, float16, float32.",
        ),
    ],
)
def test_mistakes(parse, text, argv, message, tmp_path):
    with pytest.raises(ValueError) as error:
        parse(text.format(), *argv)
    assert message.format(path=tmp_path / "recipe.yaml") in str(error.value)


def test_all_unknown_keys_are_told_at_once(parse):
    with pytest.raises(ValueError) as error:
        parse("lerning_rate: 1e-5\nmax_lenght: 8", "--output_dri", "x")
    for key in ("learning_rate", "max_length", "output_dir"):
        assert f"Did you mean {key!r}?" in str(error.value)


@pytest.mark.parametrize("device, how", [("TPU", ""), ("CPU", f"; {FOR_PROCESSES_ON_THE_CPU}")])
def test_keys_of_the_launcher_are_named_and_skipped(parse, capsys, monkeypatch, device, how):
    # Where upstream's launcher has not had its say, as where one process drives all chips.
    monkeypatch.setenv("PJRT_DEVICE", device)
    values = parse(
        "num_processes: 8\naccelerate_config: zero3\nmax_steps: 3", "--mixed_precision", "bf16", "--multi_gpu"
    )
    assert values["max_steps"] == 3
    # Upstream may warn of its own names after that.
    lines = capsys.readouterr().err.splitlines()
    keys = ": num_processes, accelerate_config, mixed_precision, multi_gpu"
    assert [line for line in lines if line.endswith(f"{keys}{how}")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"- a\n- b\n", "expected `key: value` lines, found a list"),
        (b"just words\n", "expected `key: value` lines, found a str"),
        (b"a: [1,\n", "cannot be read as YAML"),
        (b"\xff\xfe\x00", "cannot be read as YAML"),
        (b"env: 3\n", "env is 3, expected a mapping"),
    ],
)
def test_files_that_are_no_recipe(content, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_recipe(["--config", str(path)])
    assert str(path) in str(error.value)


def test_a_file_of_another_name(tmp_path):
    (tmp_path / "dpo.yaml").touch()
    with pytest.raises(ValueError) as error:
        read_recipe([str(tmp_path / "dop.yaml")])
    assert str(error.value).endswith(f"there is no such file. Did you mean {str(tmp_path / 'dpo.yaml')!r}?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_steps: 3\nlearning_rate: 1\nmax_steps: 4\n", "the key 'max_steps' stands in lines 1 and 3. Keep one"),
        ("a: 1\n\n'a': 2\na: 3\n", "the key 'a' stands in lines 1 and 3 and 4."),
        ("env:\n  HF_TPU_EXT: 1\n  HF_TPU_EXT: 0\n", "the key 'HF_TPU_EXT' stands in lines 2 and 3."),
        ("datasets:\n- path: a\n  path: b\n", "the key 'path' stands in lines 2 and 3."),
    ],
)
def test_keys_that_stand_twice(text, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        load_recipe(["--config", str(path)], "data")
    assert f"--config {path}: {message}" in str(error.value)


def test_a_key_may_stand_in_several_mappings(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "mesh: &a {path: x, b: 1}\ndatasets: [{path: x}, {path: y}]\nfsdp_config: {<<: *a, path: z}\nseed: w\n"
    )
    assert load_recipe(["--config", str(path)], "data").file["fsdp_config"] == {"path": "z", "b": 1}


def test_read_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("env:\n  PJRT_DEVICE: CPU\n  HF_TPU_EXT: 1\nmax_steps: 3\nbackend: xla\n")
    argv = ["--max_length", "8", f"--config={path}", "--backend", "cpu", "--smoke"]
    recipe = read_recipe(argv)
    assert recipe.env == {"PJRT_DEVICE": "CPU", "HF_TPU_EXT": "1"}
    assert recipe.file == {"max_steps": 3, "backend": "xla"}
    assert recipe.command_line == {"max_length": "8", "backend": "cpu"}
    assert (recipe.get("backend"), recipe.get("max_steps"), recipe.get("absent", 1)) == ("cpu", 3, 1)
    assert recipe.smoke == ".cache/tiny"
    assert recipe.argv == argv


@pytest.mark.parametrize(
    ("text", "argv", "expected"),
    [
        ("max_steps: 1", [], False),
        ("use_cpu: true", [], True),
        ("use_cpu: yes", [], True),
        ("use_cpu: true", ["--use_cpu", "false"], False),
        ("max_steps: 1", ["--use_cpu"], True),
        ("max_steps: 1", ["--use-cpu"], True),
        ("max_steps: 1", ["--use_cpu=true"], True),
        ("max_steps: 1", ["--use_cpu", "True"], True),
        ("max_steps: 1", ["--cpu"], True),
    ],
)
def test_asks_for_the_cpu(text, argv, expected, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert read_recipe(["--config", str(path), *argv]).uses_cpu is expected


@pytest.mark.parametrize(("key", "top_k"), [("kd_cache", 16), ("kd_top_k", 16), ("kd_alpha", None)])
def test_smoke_learns_from_no_more_tokens_than_the_tiny_model_has(key, top_k, tmp_path):
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    recipe = read_recipe(["--smoke", str(tmp_path)])
    recipe.file[key] = 512
    recipe.use_tiny("data")
    assert recipe.file.get("kd_top_k") == top_k


def test_smoke_needs_a_tiny_model(tmp_path):
    recipe = read_recipe(["--smoke", str(tmp_path)])
    with pytest.raises(ValueError, match=f"hf-tpu prepare tiny --output_dir {tmp_path}"):
        recipe.use_tiny("data")
