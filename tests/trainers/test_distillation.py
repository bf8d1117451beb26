"""Fine-tuning with a teacher: the values, the counts, the settings."""

import json

import pytest
import torch
from datasets import Dataset
from test_counts import train_and_count
from transformers import AutoConfig, AutoModelForCausalLM

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.examples.tiny import make_model


KD_METRICS = {"ce_loss", "kd_loss", "teacher_coverage", "teacher_agreement"}


def naive_losses(runs, trainer, teacher_dir, temperature, alpha, top_k=None):
    """The first step's loss, by plain transformers in float64 on the batch that the trainer took."""
    rows = next(iter(trainer.get_train_dataloader()))
    rows = {key: value for key, value in rows.items() if key in ("input_ids", "attention_mask", "labels")}
    ids = {key: value for key, value in rows.items() if key != "labels"}
    student = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float64)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_dir, dtype=torch.float64)
    with torch.no_grad():
        logits, teacher_logits = (model(**ids).logits[:, :-1].flatten(0, 1) for model in (student, teacher))
    labels = rows["labels"][:, 1:].flatten()
    logits, teacher_logits, labels = (value[labels != -100] for value in (logits, teacher_logits, labels))
    ce = torch.nn.functional.cross_entropy(logits, labels)
    p, log_q = (teacher_logits / temperature).softmax(-1), (logits / temperature).log_softmax(-1)
    if top_k is not None:
        best, ids = p.topk(top_k)
        rest = torch.ones_like(p).scatter(-1, ids, 0)
        p = torch.cat([best, (p * rest).sum(-1, keepdim=True)], -1)
        log_q = torch.cat([log_q.gather(-1, ids), (log_q.exp() * rest).sum(-1, keepdim=True).log()], -1)
    kd = (p * (p.log() - log_q)).sum(-1).mean()
    return ce.item(), kd.item(), ((1 - alpha) * ce + alpha * temperature**2 * kd).item()


def test_a_teacher_may_have_code_of_its_own(distil, teacher, monkeypatch):
    """As `hf-tpu cache-teacher` loads it."""
    load, trusted = AutoModelForCausalLM.from_pretrained, []

    def note(name, **kwargs):
        if name == teacher:
            trusted.append(kwargs.get("trust_remote_code"))
        return load(name, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", note)
    for trust in (False, True):
        distil(kd_teacher=teacher, trust_remote_code=trust, train=False)
    assert trusted == [False, True]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(dict(), marks=pytest.mark.slow),
        dict(kd_temperature=2.0, kd_top_k=16, kd_alpha=0.9),
    ],
    ids=["full", "top-k"],
)
def test_first_loss_is_the_formula(distil, runs, teacher, config):
    ours = distil(kd_teacher=teacher, learning_rate=0.0, max_steps=1, **config)
    tokens = "its top 16 tokens at temperature 2" if config else "all tokens at temperature 1"
    assert f"teacher {teacher}: {tokens}" in ours.adapted.changes
    temperature, alpha = config.get("kd_temperature", 1.0), config.get("kd_alpha", 0.5)
    ce, kd, loss = naive_losses(runs, ours, teacher, temperature, alpha, config.get("kd_top_k"))
    logs = ours.state.log_history[0]
    assert KD_METRICS <= set(logs)
    assert logs["ce_loss"] == pytest.approx(ce, rel=1e-5)
    assert logs["kd_loss"] == pytest.approx(kd, rel=1e-5)
    assert logs["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(dict(eval_strategy="steps", eval_steps=2), marks=pytest.mark.slow),
        pytest.param(
            dict(kd_temperature=2.0, kd_top_k=16, kd_loss="jsd", kd_beta=0.3, gradient_accumulation_steps=2),
            marks=pytest.mark.ci,
        ),
        dict(lora={}, kd_loss="reverse_kl"),
    ],
    ids=["evaluated", "jsd-accumulated", "lora"],
)
def test_xla_is_eager_cpu(distil, same_logs, teacher, config):
    ours = distil(kd_teacher=teacher, **config)
    same_logs(ours, distil("cpu", kd_teacher=teacher, **config))
    assert ours.watch.recompiles == 0
    if "eval_steps" in config:
        evaluated = next(entry for entry in ours.state.log_history if "eval_loss" in entry)
        assert {f"eval_{name}" for name in KD_METRICS} <= set(evaluated)


@pytest.mark.slow
def test_packed_rows_hold_the_same_documents(distil, teacher):
    """All documents in one step, packed and each in a row of its own: the teacher too sees one document at a time."""
    config = dict(kd_teacher=teacher, max_steps=1, learning_rate=0.0)
    packed = distil(packing=True, per_device_train_batch_size=16, **config).state.log_history[0]
    alone = distil(per_device_train_batch_size=22, **config).state.log_history[0]
    for key in ("loss", "ce_loss", "kd_loss", "teacher_agreement"):
        assert packed[key] == pytest.approx(alone[key], rel=1e-5), key


@pytest.mark.ci
def test_the_own_base_is_an_anchor(distil):
    """At the start the student is its base; later it is held near it, the more so with a greater weight."""
    logs = {}
    for alpha in (0.1, 0.9):
        trainer = distil(
            kd_teacher="base", kd_alpha=alpha, lora={"init_lora_weights": True}, max_steps=12, learning_rate=1e-2
        )
        logs[alpha] = trainer.state.log_history
    assert logs[0.1][0]["kd_loss"] == pytest.approx(0, abs=1e-6) and logs[0.1][0]["teacher_agreement"] == 1
    assert 0 < logs[0.9][11]["kd_loss"] < logs[0.1][11]["kd_loss"]
    assert logs[0.1][11]["ce_loss"] < logs[0.1][0]["ce_loss"]


@pytest.mark.parametrize("setting", [{"init_lora_weights": "pissa"}, {"bias": "all"}])
def test_a_base_that_is_not_that_of_the_start_is_no_teacher(distil, runs, setting):
    """PiSSA takes its adapter off the base, and biases are trained in their place. The model itself is loaded beside it."""
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"with {name}={value!r} that is not the model .* Set kd_teacher='"):
        distil("cpu", kd_teacher="base", lora=setting)
    trainer = distil("cpu", kd_teacher=str(runs.model_dir), lora=setting, max_steps=1, logging_steps=1)
    assert trainer.state.log_history[0]["kd_loss"] == pytest.approx(0, abs=1e-6)


@pytest.mark.ci
def test_a_weight_of_nothing_is_plain_fine_tuning(distil, runs, teacher):
    ours, plain = distil(kd_teacher=teacher, kd_alpha=0.0), runs.stock(max_steps=4, warmup_steps=0)
    for mine, other in zip(ours.state.log_history[:4], plain.state.log_history[:4], strict=True):
        for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
            assert mine[key] == pytest.approx(other[key], rel=1e-5), key
        assert mine["ce_loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.ci
def test_learning_from_the_teacher_alone(distil, teacher):
    trainer = distil(kd_teacher=teacher, kd_alpha=1.0, max_steps=30, learning_rate=1e-2)
    logs = trainer.state.log_history
    assert logs[29]["kd_loss"] < 0.5 * logs[0]["kd_loss"]


@pytest.mark.parametrize(
    "accumulation", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.ci)]
)
def test_executions_and_reads_are_those_of_plain_fine_tuning(runs, xla, teacher, accumulation):
    _, steps = train_and_count(
        runs, kd_teacher=teacher, max_steps=5, logging_steps=100, gradient_accumulation_steps=accumulation
    )
    # The first step of a run is the one in which torch_tpu traces, by operators and reads of its own.
    counted = steps if xla.traces_steps else steps[1:]
    assert {step.executions for step in counted} == {accumulation}
    assert {step.reads for step in counted[:-1]} == {0}
    assert sum(step.compiles for step in steps[1:]) == 0


@pytest.mark.ci
def test_resumed_bit_for_bit(distil, teacher, tmp_path):
    config = dict(kd_teacher=teacher, max_steps=6, save_strategy="steps", save_steps=3)
    whole = distil(**config, output_dir=str(tmp_path / "run"))
    again = distil(**config, output_dir=str(tmp_path / "run"), train=False)
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-3"))
    for mine, other in zip(again.state.log_history[3:6], whole.state.log_history[3:6], strict=True):
        assert {key: mine[key] for key in ("loss", "kd_loss", "grad_norm")} == {
            key: other[key] for key in ("loss", "kd_loss", "grad_norm")
        }


@pytest.mark.slow
@pytest.mark.torch_xla
def test_eight_chips(same_on_eight_chips, teacher):
    """Data parallel by chips alone, and split weights, teacher included."""
    same_on_eight_chips(
        {
            "data": dict(kd_teacher=teacher, gradient_accumulation_steps=2),
            "lora": dict(kd_teacher=teacher, lora={}),
            "fsdp": dict(kd_teacher=teacher, mesh="fsdp", kd_top_k=16, kd_temperature=2.0),
            "both": dict(kd_teacher="base", lora={}, mesh="data=2,fsdp=4"),
        }
    )


BAD = [
    (dict(kd_teacher="a", kd_alpha=1.5), "is not from 0 to 1"),
    (dict(kd_teacher="a", kd_alpha=-0.1), "is not from 0 to 1"),
    (dict(kd_teacher="a", kd_temperature=0.0), "not above 0"),
    (dict(kd_teacher="a", kd_top_k=0), "at least 1"),
    (dict(kd_teacher="a", kd_loss="mse"), "forward_kl, reverse_kl, jsd"),
    (dict(kd_teacher="a", kd_beta=1.0), "kd_loss='forward_kl'"),
    (
        dict(kd_teacher="a", kd_beta=0.9),
        "kd_beta=0.9 has no effect without the loss that it is for. Set kd_loss='jsd'",
    ),
    (dict(kd_teacher="a", kd_preload=True), "Set kd_cache=DIRECTORY, or leave kd_preload out"),
    (dict(kd_alpha=0.9), "kd_alpha=0.9 has no effect without a teacher"),
    (dict(kd_teacher="a", loss_type="dft"), "loss_type"),
    (dict(kd_teacher="a", label_smoothing_factor=0.1), "label_smoothing_factor"),
]


@pytest.mark.parametrize(("config", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_settings(config, message, tmp_path):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        TPUSFTConfig(str(tmp_path), bf16=False, **config)


def test_a_loss_of_ones_own_has_no_room_for_a_teacher(distil, teacher):
    def loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.sum()

    message = "compute_loss_func replaces that. Leave compute_loss_func out, or leave kd_teacher"
    with pytest.raises(ValueError, match=message):
        distil("cpu", kd_teacher=teacher, kwargs={"compute_loss_func": loss}, train=False)
    trainer = distil("cpu", kd_teacher=teacher, train=False)
    trainer.compute_loss_func = loss
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_more_tokens_than_the_vocabulary_has(distil, runs, xla, teacher):
    vocab_size = AutoConfig.from_pretrained(runs.model_dir).vocab_size
    message = (
        rf"kd_top_k={vocab_size + 1}, but the vocabulary of '.+' has {vocab_size} tokens. Set kd_top_k to 1\.\.\."
    )
    for config in (dict(kd_teacher=teacher), dict(kd_teacher="base", lora={})):
        for backend in ("cpu", xla.name):
            with pytest.raises(ValueError, match=message):
                distil(backend, kd_top_k=vocab_size + 1, **config)
            assert distil(backend, kd_top_k=vocab_size, train=False, **config).teacher is not None


def test_more_tokens_than_the_teacher_has(distil, runs, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "small", num_hidden_layers=1))
    vocab_size = model.config.vocab_size - 1
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    model.save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=f"small' has {vocab_size} tokens"):
        distil("cpu", kd_top_k=vocab_size + 1, kd_teacher=str(tmp_path / "small"))


def test_a_token_that_the_teacher_has_no_row_for(distil, runs, tmp_path):
    """Eager PyTorch has an IndexError. The student has the row."""
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "small", num_hidden_layers=1))
    largest = model.config.vocab_size - 1
    model.resize_token_embeddings(largest, mean_resizing=False)
    model.save_pretrained(tmp_path / "small")
    rows = Dataset.from_list([{"input_ids": [5, 6, largest, 8]}] * 4)
    message = (
        f"token id {largest} in `input_ids`, but the teacher's embedding has {largest} rows: .* Set kd_teacher to"
    )
    with pytest.raises(ValueError, match=message):
        distil(kd_teacher=str(tmp_path / "small"), kwargs={"train_dataset": rows})


def test_bad_teachers(distil, runs, tmp_path):
    with pytest.raises(ValueError, match="the student itself"):
        distil(kd_teacher=str(runs.model_dir))
    with pytest.raises(ValueError, match="adapters switched off, but this student has none"):
        distil(kd_teacher="base")
    other = make_model(tmp_path / "other", hidden_size=16, num_hidden_layers=1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="another vocabulary"):
        distil(kd_teacher=str(other))
