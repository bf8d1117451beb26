"""Fine-tuning from a teacher's cache: the same as beside the teacher itself, to the 16 bits that are kept."""

from functools import cache

import pytest
import torch
from fixes import refusal
from test_counts import train_and_count
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from hf_tpu_ext.distillation.cache_builder import Sequences, TeacherRun, build_cache, weights_hash
from hf_tpu_ext.distillation.cache_format import CacheSettings, chat_template_hash, tokenizer_hash
from hf_tpu_ext.distillation.cache_writer import CacheWriter
from hf_tpu_ext.layers.static_kernels import use_static_kernels


VOCABULARY = 259


@pytest.fixture(scope="module")
def make_cache(xla, runs_class, tiny_model, teacher, tmp_path_factory):
    """Runs the teacher over the prepared data of `runs`, once for all tests of the same cache."""
    runs = runs_class(tiny_model, tmp_path_factory.mktemp("run"))

    @cache
    def make(top_k=32, teacher=teacher, train_dataset=runs.train_dataset):
        directory = tmp_path_factory.mktemp("caches") / "cache"
        trainer = runs.ours(train=False, kwargs={"train_dataset": train_dataset})
        model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
        add_fused_lm_head(model)
        use_static_kernels(model)
        trainer.backend.place(model)
        sequences = Sequences([trainer.train_dataset, trainer.eval_dataset])
        settings = CacheSettings(
            teacher=teacher,
            teacher_hash=weights_hash(AutoModelForCausalLM.from_pretrained(teacher)),
            tokenizer_hash=tokenizer_hash(runs.tokenizer),
            chat_template_hash=chat_template_hash(runs.tokenizer),
            vocab_size=VOCABULARY,
            top_k=top_k,
            temperatures=(1.0, 2.0),
            max_length=trainer.args.max_length,
            compute_dtype="float32",
            dataset_hash=sequences.hash,
            sequences=len(sequences.keys),
            tokens=sum(sequences.lengths),
        )
        writer = CacheWriter(directory, settings, sequences.keys, sequences.lengths, False)
        run = TeacherRun(model, trainer.backend, trainer.data_collator, 8, runs.tokenizer.pad_token_id)
        build_cache(run, sequences, writer, quiet=True)
        return str(directory)

    return make


@pytest.mark.parametrize(
    ("top_k", "temperature"),
    [pytest.param(32, 2.0, marks=pytest.mark.slow), pytest.param(VOCABULARY, 1.0, marks=pytest.mark.ci)],
)
def test_the_cache_stands_for_the_teacher(distil, make_cache, teacher, top_k, temperature):
    config = dict(kd_temperature=temperature, kd_top_k=top_k, kd_alpha=0.9, eval_strategy="steps", eval_steps=4)
    cached = distil(kd_cache=make_cache(top_k=top_k), kd_preload=True, **config)
    online = distil(kd_teacher=teacher, **config)
    assert cached.watch.recompiles == 0
    for mine, other in zip(cached.state.log_history[:-1], online.state.log_history[:-1], strict=True):
        for key in ("loss", "grad_norm", "kd_loss", "ce_loss", "teacher_coverage", "eval_loss", "eval_kd_loss"):
            if key in other:
                assert mine[key] == pytest.approx(other[key], rel=2e-3), key


def test_a_batch_says_how_long_its_rows_are(distil, runs, make_cache):
    """As without a teacher: noise and rotary embeddings depend on it, and tokens are counted by it."""
    batches = []
    for trainer in (distil(kd_cache=make_cache(), train=False), runs.ours(train=False)):
        rows = [trainer.train_dataset[index] for index in range(2)]
        batches.append(trainer.data_collator([{key: row[key] for key in ("input_ids", "labels")} for row in rows]))
    cached, plain = batches
    assert cached.keys() - plain.keys() == {"teacher_ids", "teacher_log_probs", "teacher_log_tail"}
    assert vars(cached) == vars(plain) and cached.length < cached["input_ids"].shape[1]


def test_xla_is_eager_cpu(distil, make_cache, same_logs):
    config = dict(kd_cache=make_cache(), kd_temperature=2.0, kd_top_k=8, gradient_accumulation_steps=2, lora={})
    same_logs(distil(**config), distil("cpu", **config))


@pytest.mark.slow
def test_eight_chips(rows, same_on_eight_chips, make_cache):
    made = make_cache(train_dataset=rows(120))
    specs = {"data": dict(gradient_accumulation_steps=2), "fsdp": dict(mesh="fsdp", kd_temperature=2.0)}
    same_on_eight_chips(specs, kd_cache=made)


@pytest.mark.slow
def test_executions_and_reads_are_those_of_plain_fine_tuning(runs, make_cache):
    _, steps = train_and_count(runs, kd_cache=make_cache(), max_steps=5, logging_steps=100)
    assert {step.executions for step in steps} == {1}
    assert {step.reads for step in steps[:-1]} == {0}
    assert sum(step.compiles for step in steps[1:]) == 0


def test_bad_caches(rows, distil, make_cache, tmp_path):
    made = make_cache()
    for config, message in (
        (dict(kd_cache=str(tmp_path / "nothing")), "hf-tpu cache-teacher"),
        (dict(kd_cache=made, kd_temperature=3.0), r"\[1.0, 2.0\]"),
        (dict(kd_cache=made, kd_top_k=64), "1...32"),
        (dict(kd_cache=made, max_length=40), "max_length=48"),
        (dict(kd_cache=made, packing=True), "packing=False"),
        (dict(kd_cache=made, kd_teacher="another/teacher"), "another/teacher"),
        (dict(kd_cache=made, kwargs={"train_dataset": rows(9, seed=7)}), "9 of 9 sequences of train_dataset"),
    ):
        with pytest.raises(ValueError, match=message):
            distil(**config)


@pytest.mark.ci
def test_rows_that_are_joined_without_a_device_of_static_shapes(distil, make_cache):
    with pytest.raises(ValueError, match=r"looked up by the row\. Set padding_free=False"):
        distil("cpu", kd_cache=make_cache(), padding_free=True)


@pytest.mark.ci
def test_a_cache_of_the_student_itself_and_what_the_start_says(runs, distil, make_cache, capsys):
    made = make_cache(teacher=str(runs.model_dir))
    message = refusal(distil, {"kd_cache": made})
    assert "the student itself. Train with LoRA (use_peft: true)" in message
    assert "or build a cache of another teacher: hf-tpu cache-teacher" in message
    distil(kd_cache=made, kd_teacher=str(runs.model_dir), kd_temperature=2.0, max_steps=1, lora={})
    out = capsys.readouterr().out
    assert "its top 32 tokens" in out and "of its mass at temperature 2" in out and "all tokens" not in out
    distil(kd_cache=made, kd_teacher=str(runs.model_dir), kd_temperature=2.0, kd_top_k=16, max_steps=1, lora={})
    assert "its top 16 tokens of 32 at temperature 2" in capsys.readouterr().out
