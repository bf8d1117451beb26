"""A checkpoint has upstream's form, and a resumed run is the run that was never stopped."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.serialization import config
from transformers import AutoModelForCausalLM
from trl import SFTTrainer

from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.trainers.checkpoint.verification import find_damage


BATCHES_PER_EPOCH = 6  # 22 rows in batches of 4
EVERY_STEP = dict(save_strategy="steps", save_steps=1)
SAVED = dict(max_steps=6, save_strategy="steps", save_steps=2)


def weights_and_moments(trainer):
    """Parameters and optimizer state, on the host."""
    return trainer.backend.fetch(dict(trainer.model.state_dict())), trainer.optimizer.state_dict()["state"]


def drop(trainer, *names):
    """Drop values from the log history, and the closing summary, which covers only the steps of its own call."""
    *trainer.state.log_history, _ = (
        {key: value for key, value in entry.items() if key not in names} for entry in trainer.state.log_history
    )
    return trainer


def resume(trainer, checkpoint):
    trainer.train(resume_from_checkpoint=checkpoint if checkpoint is True else str(checkpoint))
    return trainer


def logits_of(model, send=lambda data: data, fetch=lambda data: data):
    ids = torch.arange(3, 51).reshape(2, 24)
    model.eval()
    with torch.no_grad():
        return fetch(model(input_ids=send(ids)).logits)


def trained_logits(trainer):
    """Logits on XLA, which differ from those on the CPU in their last bits."""
    return logits_of(trainer.model, trainer.backend.send, trainer.backend.fetch)


def assert_logits_close(logits, trained):
    torch.testing.assert_close(logits, trained, rtol=0, atol=5e-6)


@pytest.fixture(scope="module")
def kept_runs():
    return []


@pytest.fixture
def saved_run(runs, kept_runs, tmp_path_factory):
    """A run of six steps that saved every second one. It is made once; its directory is here a copy in the place of `runs`'."""
    if not kept_runs:
        directory = str(tmp_path_factory.mktemp("saved"))
        kept_runs.append(drop(runs.ours(**SAVED, output_dir=directory)))
    shutil.copytree(kept_runs[0].args.output_dir, runs.output_dir)
    return kept_runs[0]


# ---- Resuming on the same device ----


@pytest.mark.parametrize(
    "lora",
    [pytest.param(None, id="full", marks=pytest.mark.slow), pytest.param({"lora_dropout": 0.1}, id="lora-dropout")],
)
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_resumes_bit_for_bit(runs, same_logs, tmp_path, accumulation, lora):
    """In mid-epoch and between two epochs. The run that was never stopped saves nothing: a save changes nothing."""
    epoch = BATCHES_PER_EPOCH // accumulation
    config = dict(lora=lora, gradient_accumulation_steps=accumulation, max_steps=epoch + 3, warmup_steps=2)
    undisturbed = drop(runs.ours(**config, output_dir=str(tmp_path / "undisturbed")))
    runs.ours(**config, **EVERY_STEP)
    for step in (2, epoch, epoch + 1):
        resumed = runs.ours(train=False, **config, output_dir=str(tmp_path / "resumed"))
        drop(resume(resumed, runs.output_dir / f"checkpoint-{step}"))
        torch.testing.assert_close(weights_and_moments(resumed), weights_and_moments(undisturbed), rtol=0, atol=0)
        same_logs(resumed, undisturbed, rel=0)


@pytest.mark.ci
def test_token_count_goes_on_after_a_save_between_two_logs(runs, tmp_path):
    config = dict(max_steps=8, logging_steps=3)
    whole = runs.ours(**config, **EVERY_STEP)
    resumed = runs.ours(train=False, **config, output_dir=str(tmp_path / "resumed"))
    resume(resumed, runs.output_dir / "checkpoint-4")
    counts, expected = (
        {entry["step"]: entry["num_tokens"] for entry in run.state.log_history if "num_tokens" in entry}
        for run in (resumed, whole)
    )
    assert counts == expected and expected[3] < expected[6]


@pytest.mark.ci
def test_streaming_data_goes_on_where_it_stopped(runs, same_logs, tmp_path):
    config = dict(max_steps=8, max_length=40, kwargs={"train_dataset": runs.train_dataset.to_iterable_dataset()})
    whole = drop(runs.ours(**config, **EVERY_STEP))
    resumed = runs.ours(train=False, **config, output_dir=str(tmp_path / "resumed"))
    same_logs(drop(resume(resumed, runs.output_dir / "checkpoint-4")), whole, rel=0)


@pytest.mark.ci
def test_an_epoch_in_an_order_of_its_own_goes_on_where_it_stopped(runs, same_logs, tmp_path):
    """`group_by_length` draws an epoch's order when the epoch begins, from no seed but the state at that time."""
    config = dict(max_steps=9, train_sampling_strategy="group_by_length")
    whole = drop(runs.ours(**config, **EVERY_STEP))
    resumed = runs.ours(train=False, **config, output_dir=str(tmp_path / "resumed"))
    same_logs(drop(resume(resumed, runs.output_dir / f"checkpoint-{BATCHES_PER_EPOCH + 2}")), whole, rel=0)


# ---- The form ----


def make_tied_model(tmp_path):
    return make_model(
        tmp_path / "tied", hidden_size=32, intermediate_size=48, num_hidden_layers=1, tie_word_embeddings=True
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_saved_model_is_the_trained_one_with_tied_weights_once(runs, tmp_path, tied):
    model_dir = make_tied_model(tmp_path) if tied else runs.model_dir
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    before = logits_of(model)
    trainer = runs.ours(model=model, max_steps=3, **EVERY_STEP)
    trainer.save_model()
    trained = trained_logits(trainer)
    trained_weights, _ = weights_and_moments(trainer)
    assert not torch.allclose(trained, before, atol=1e-3)
    for directory in (runs.output_dir, runs.output_dir / "checkpoint-3"):
        with safe_open(directory / "model.safetensors", "pt") as saved:
            assert "model.embed_tokens.weight" in saved.keys()
            assert ("lm_head.weight" in saved.keys()) == (not tied)
        loaded = AutoModelForCausalLM.from_pretrained(directory)
        assert loaded.dtype == torch.float32
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        torch.testing.assert_close(dict(loaded.state_dict()), trained_weights, rtol=0, atol=0)
        assert_logits_close(logits_of(loaded), trained)


def test_tied_weights_stay_tied_when_resumed(runs, same_logs, tmp_path):
    model_dir = make_tied_model(tmp_path)

    def load():
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    whole = drop(runs.ours(model=load(), max_steps=4, **EVERY_STEP))
    resumed = runs.ours(model=load(), train=False, max_steps=4, output_dir=str(tmp_path / "resumed"))
    resume(resumed, runs.output_dir / "checkpoint-2")
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight
    same_logs(drop(resumed), whole, rel=0)


@pytest.mark.ci
def test_saved_adapter_is_the_trained_one(runs):
    trainer = runs.ours(lora={}, max_steps=3, **EVERY_STEP)
    trainer.save_model()
    trained = trained_logits(trainer)
    trained_weights, _ = weights_and_moments(trainer)
    base = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
    untrained = logits_of(base)
    for directory in (runs.output_dir, runs.output_dir / "checkpoint-3"):
        assert all("lora_" in name for name in load_file(directory / "adapter_model.safetensors"))
        adapted = PeftModel.from_pretrained(base, str(directory))
        torch.testing.assert_close(dict(adapted.state_dict()), trained_weights, rtol=0, atol=0)
        assert_logits_close(logits_of(adapted), trained)
        base = adapted.unload()
    assert (trained - untrained).abs().max() > 1e-4


def test_an_adapter_that_changes_its_base_is_saved_for_the_original(runs, tmp_path):
    """PiSSA, converted as PEFT's documentation says."""
    base = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="pissa"))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    trainer = runs.ours(model=model, max_steps=3, learning_rate=1e-2)
    trained = trained_logits(trainer)
    trainer.model.save_pretrained(
        tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    original = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
    untrained = logits_of(original)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for saved in (PeftModel.from_pretrained(original, str(tmp_path / "converted")), merged):
        torch.testing.assert_close(logits_of(saved), trained, rtol=0, atol=5e-5)
    assert (trained - untrained).abs().max() > 1e-3


READER = """
import sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

full, adapter, out = sys.argv[1:]
for checkpoint in (full, adapter):
    # No `map_location`: the tensors are loaded to where they were saved from.
    state = torch.load(f"{checkpoint}/optimizer.pt", weights_only=True)["state"]
    tensors = [value for moments in state.values() for value in moments.values()]
    assert tensors and {tensor.device.type for tensor in tensors} == {"cpu"}
    torch.load(f"{checkpoint}/scheduler.pt", weights_only=True)
ids = torch.arange(3, 51).reshape(2, 24)
with torch.no_grad():
    logits = {
        "full": AutoModelForCausalLM.from_pretrained(full)(input_ids=ids).logits,
        "adapter": AutoModelForCausalLM.from_pretrained(adapter)(input_ids=ids).logits,
    }
save_file(logits, out)
assert not {"torch_xla", "torch_tpu"} & {*sys.modules}
"""


@pytest.mark.slow
def test_a_process_without_torch_xla_reads_what_was_saved(runs, tmp_path, monkeypatch):
    full = runs.ours(max_steps=2, output_dir=str(tmp_path / "full"), **EVERY_STEP)
    adapter = runs.ours(lora={}, max_steps=2, output_dir=str(tmp_path / "adapter"), **EVERY_STEP)
    monkeypatch.delenv("PJRT_DEVICE")
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    # Nor torch_tpu, which PyTorch loads by itself.
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    checkpoints = [str(tmp_path / name / "checkpoint-2") for name in ("full", "adapter")]
    subprocess.run([sys.executable, "-c", READER, *checkpoints, str(tmp_path / "logits")], check=True)
    logits = load_file(tmp_path / "logits")
    assert_logits_close(logits["full"], trained_logits(full))
    assert_logits_close(logits["adapter"], trained_logits(adapter))


@pytest.mark.torch_xla
def test_an_optimizer_of_ones_own_is_saved_from_the_host(runs, xla):
    """Made for the model on the device."""
    model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
    optimizer = torch.optim.SGD(xla.place(model).parameters(), lr=0.1, momentum=0.9)
    trainer = runs.ours(model=model, train=False, kwargs={"optimizers": (optimizer, None)})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.create_optimizer().step()
    state = trainer.optimizer.state_dict()["state"]
    assert {value["momentum_buffer"].device.type for value in state.values()} == {"cpu"}


# ---- From one device to another ----


@pytest.mark.parametrize("lora", [pytest.param(None, id="full", marks=pytest.mark.slow), pytest.param({}, id="lora")])
@pytest.mark.parametrize("optim", ["adamw_torch", pytest.param("adamw_torch_fused", marks=pytest.mark.slow)])
def test_checkpoint_of_stock_on_cpu_resumes_on_xla(runs, same_logs, tmp_path, monkeypatch, optim, lora):
    """With one read per log and one at the end: nothing of the loaded optimizer state is read in a step."""
    mapped = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *args, **kwargs: mapped.append(config.load.mmap) or load(*args, **kwargs)
    )
    whole = drop(runs.stock(lora=lora, optim=optim, **EVERY_STEP), "num_tokens")
    resumed = runs.ours(lora=lora, optim=optim, train=False, output_dir=str(tmp_path / "resumed"))
    before = resumed.backend.counters()
    resume(resumed, runs.output_dir / "checkpoint-4")
    if resumed.backend.traces_steps:
        assert (resumed.backend.counters() - before).reads == 4 + 1
    assert resumed.watch.recompiles == 0
    # The file of the optimizer, whose tensors go to the device one by one; of what is loaded else, none.
    assert mapped.count(True) == 2 and not mapped[-1]
    # Upstream's trainer keeps no token count; it begins anew in its own resumed runs, too.
    same_logs(drop(resumed, "num_tokens"), whole)


@pytest.mark.ci
@pytest.mark.parametrize("lora", [pytest.param(None, id="full", marks=pytest.mark.slow), pytest.param({}, id="lora")])
def test_checkpoint_of_xla_resumes_with_stock_on_cpu(runs, same_logs, tmp_path, lora):
    whole = drop(runs.ours(lora=lora, **EVERY_STEP), "num_tokens")
    stock = runs.trainer(SFTTrainer, runs.config(use_cpu=True, output_dir=str(tmp_path / "resumed")), lora=lora)
    same_logs(drop(resume(stock, runs.output_dir / "checkpoint-4"), "num_tokens"), whole)


# ---- Which checkpoint ----


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_checkpoint_that_was_not_written_to_its_end_is_skipped(runs, saved_run, same_logs, caplog, damage):
    state = runs.output_dir / "checkpoint-4" / "trainer_state.json"
    for later in (runs.output_dir / "checkpoint-6").iterdir():
        later.unlink()
    if damage == "missing":
        state.unlink()
    else:
        state.write_text(state.read_text()[:-40])
    resumed = resume(runs.ours(train=False, **SAVED), True)
    lines = [record.message for record in caplog.records if " is skipped: " in record.message]
    assert [line.partition(" is skipped")[0] for line in lines] == [
        str(runs.output_dir / f"checkpoint-{step}") for step in (6, 4)
    ]
    assert "the checkpoint is incomplete" in lines[0] and "trainer_state.json" in lines[1]
    same_logs(drop(resumed), saved_run, rel=0)
    assert json.loads(state.read_text())["global_step"] == 4


def test_a_checkpoint_that_was_changed_on_purpose_is_accepted_as_the_message_says(
    runs, saved_run, same_logs, tmp_path
):
    checkpoint = tmp_path / "it's mine" / "checkpoint-2"
    shutil.copytree(runs.output_dir / "checkpoint-2", checkpoint)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps(state | {"save_steps": 3}))

    def resumed():
        return runs.ours(train=False, max_steps=6, output_dir=str(tmp_path / "resumed"))

    with pytest.raises(ValueError, match="is damaged: .* If it was changed on purpose") as refused:
        resumed().train(resume_from_checkpoint=str(checkpoint))
    subprocess.run(str(refused.value).rpartition(": ")[2], shell=True, check=True)
    trainer = resumed()
    resume(trainer, checkpoint)
    same_logs(drop(trainer), saved_run, rel=0)


def test_weights_may_be_put_into_other_shards(runs, saved_run, same_logs, tmp_path, caplog):
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(runs.output_dir / "checkpoint-2", checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="10KB")
    shards = sorted(checkpoint.glob("model-*.safetensors"))
    assert len(shards) > 1
    trainer = runs.ours(train=False, max_steps=6, output_dir=str(tmp_path / "resumed"))
    with caplog.at_level("WARNING"):
        resume(trainer, checkpoint)
    assert f"{checkpoint}: the weights are in other files than the run wrote" in caplog.text
    same_logs(drop(trainer), saved_run, rel=0)
    # One that was cut short is damage all the same, and so is one that is not there.
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    assert find_damage(checkpoint) == "model.safetensors is missing"
    shards[0].unlink()
    assert find_damage(checkpoint) == "model.safetensors is missing"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("before", "after"), [("adamw_torch", "sgd"), pytest.param("sgd", "adamw_torch", marks=pytest.mark.slow)]
)
def test_the_state_of_another_optimizer_is_refused(runs, tmp_path, before, after):
    runs.ours(max_steps=1, optim=before, **EVERY_STEP)
    checkpoint = runs.output_dir / "checkpoint-1"
    with pytest.raises(
        ValueError, match=rf"state of another optimizer than optim={after}: .* is not in it. Set optim"
    ):
        resume(runs.ours(train=False, max_steps=2, optim=after), checkpoint)
    # What the message says.
    resume(runs.ours(train=False, max_steps=2, optim=before), checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    runs.ours(model=model, max_steps=1, optim=after, output_dir=str(tmp_path / "new"))


def test_the_state_of_other_parameters_is_refused(runs, saved_run):
    model = AutoModelForCausalLM.from_pretrained(runs.model_dir)
    model.get_input_embeddings().requires_grad_(False)
    with pytest.raises(
        ValueError, match="optimizer's state of other parameters than this run trains .* Set the model, the"
    ):
        resume(runs.ours(model=model, train=False, max_steps=2), runs.output_dir / "checkpoint-2")


def test_a_checkpoint_without_the_optimizer_says_so(runs, caplog):
    runs.ours(max_steps=1, save_only_model=True, **EVERY_STEP)
    resume(runs.ours(train=False, max_steps=2), True)
    assert (
        "checkpoint-1 has no optimizer.pt, as with save_only_model: the optimizer and the learning rate" in caplog.text
    )


def test_nothing_to_resume_is_an_error_that_says_what_to_give(runs, tmp_path):
    trainer = runs.ours(train=False, max_steps=2, save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match="Leave resume_from_checkpoint out to start over"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="it does not exist.*Give a checkpoint-N directory"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="trainer_state.json is missing.*Give a checkpoint-N directory"):
        trainer.train(resume_from_checkpoint=str(tmp_path))
    trainer.train()
    with pytest.raises(ValueError, match="It holds checkpoint-2: give one of these"):
        trainer.train(resume_from_checkpoint=str(runs.output_dir))
