"""The record and the report of a run."""

import contextlib
import inspect
import itertools
import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

import hf_tpu_ext
from hf_tpu_ext import TPUSFTConfig, TrainingPreempted
from hf_tpu_ext.report import figures, make
from hf_tpu_ext.report.parts import Figure
from hf_tpu_ext.report.record import RECORD_NAME, read_run
from hf_tpu_ext.report.sections import time_of_step
from hf_tpu_ext.trainers import ExtensionArguments
from hf_tpu_ext.trainers.run.status import _changed_fields, _settings_of_adapter
from hf_tpu_ext.watch.compilations import TooManyRecompiles


CONFIG = dict(config_cls=TPUSFTConfig, run_report=True, max_steps=6, logging_steps=2)


@pytest.fixture(autouse=True)
def without_pictures(request, monkeypatch):
    """Figures of reports have no pictures, which take longer than a run, but for one test. Those of tests/report have them."""
    if request.node.name != "test_a_run_leaves_its_report":
        monkeypatch.setattr(figures, "_draw", lambda title, *rest, **more: Figure(title, "<svg/>"))


def test_a_run_leaves_its_report(runs, capsys):
    # Of a rank that no other test has: programs are compiled once in a process.
    trainer = runs.ours(
        **{**CONFIG, "logging_steps": 4},
        include_num_input_tokens_seen="non_padding",
        lora={"r": 3},
        eval_strategy="steps",
        eval_steps=3,
        gradient_accumulation_steps=2,
        hub_token="hf_secret",
        model_init_kwargs={"token": "hf_secret", "dtype": "float32"},
        save_strategy="steps",
        save_steps=6,
    )
    trainer.save_model()
    assert trainer.args.hub_token == trainer.args.model_init_kwargs["token"] == "hf_secret"
    run = read_run(runs.output_dir)
    assert run.steps == 6 and run.unreadable == 0 and run.sessions[0].end["counters"]["compiles"] > 0
    logs, history = ([log for log in logs if "loss" in log] for logs in (run.logs, trainer.state.log_history))
    for entry, logged in zip(logs, history, strict=True):
        assert {key: entry[key] for key in logged} == logged
    assert [entry["step"] for entry in run.evaluations] == [3, 6]
    assert [(one["kind"], tuple(one["shape"])) for one in run.programs if one["shape"]] == list(trainer.watch.programs)
    assert run.phases.total() == pytest.approx(trainer.status.clock.seconds.total(), abs=0.01)
    assert run.step_times["total"].total() == 6
    assert {shape: tuple(counts) for shape, counts in run.batches.items()} == {
        shape: (count.batches, count.tokens, count.padded_tokens) for shape, count in trainer.status.batches.items()
    }
    # The last two steps are after the last log.
    batches, tokens, _ = map(sum, zip(*run.batches.values(), strict=True))
    assert batches == 12 and tokens == trainer.state.num_input_tokens_seen
    facts = run.begin
    assert facts["model"]["trained"] < facts["model"]["parameters"]
    assert {"max_steps", "learning_rate", "hub_token"} <= set(facts["changed"]) and "weight_decay" in facts["changed"]
    assert "adam_beta1" not in facts["changed"]
    # Left out, upstream makes `True` of it.
    assert "bf16" in facts["changed"]
    assert facts["arguments"]["peft_config.r"] == 3 and "peft_config.r" in facts["changed"]
    assert {"torch", "transformers", "trl", "hf_tpu_ext", "python"} <= facts["versions"].keys()
    text = (runs.output_dir / "report.html").read_text() + (runs.output_dir / "report.md").read_text()
    written = [path for path in runs.output_dir.rglob("*") if path.is_file()]
    assert {"training_args.bin", RECORD_NAME, "report.html"} <= {path.name for path in written}
    assert [path for path in written if b"hf_secret" in path.read_bytes()] == []
    assert str(runs.model_dir) in text and "micro-step" in text
    assert f"Report: {runs.output_dir / 'report.html'}" in capsys.readouterr().out


class _Reads(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        next(model.parameters()).sum().item()


def test_code_and_syncs_of_the_users_are_in_the_record(runs):
    runs.ours(**{**CONFIG, "max_steps": 8}, kwargs={"callbacks": [_Reads()]})
    run = read_run(runs.output_dir)
    line = inspect.getsourcelines(_Reads)[1]
    assert run.begin["arguments"]["callbacks"] == f"_Reads, test_run_record.py:{line}"
    assert "callbacks" in run.begin["changed"] and "data_collator" not in run.begin["arguments"]
    assert run.syncs == [f"`.item()` syncs device to host [test_run_record.py:{line + 2}]"]


class _Compiles(TrainerCallback):
    """Compiles a program of its own in a step that is replayed, and another before the run."""

    def on_train_begin(self, args, state, control, model, **kwargs):
        (next(model.parameters()).detach() * 3).sum().item()

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 5:
            (next(model.parameters()).detach() * 5).sum().item()


@pytest.mark.ci
def test_places_of_a_report_agree(runs, capsys):
    """Also about what callbacks compile, and what they take before the record begins."""
    # Of a rank that no other test has.
    runs.ours(**CONFIG, lora={"r": 7}, show_samples=2, kwargs={"callbacks": [_Compiles()]})
    run = read_run(runs.output_dir)
    (session,) = run.sessions
    counters, seconds = session.end["counters"], sum(one["seconds"] for one in run.programs)
    assert len(run.programs) == counters["compiles"]
    assert seconds == pytest.approx(counters["compile_seconds"], abs=1e-6)
    assert run.phases["compile"] == pytest.approx(seconds, abs=1e-5)
    assert run.phases.total() <= session.seconds + 0.002
    # What it takes to answer prompts is of no step.
    assert run.phases["samples"] > 0 and "samples" not in time_of_step(run)
    assert (
        f"{counters['compiles']} graphs compiled in {counters['compile_seconds']:.1f} s, " in capsys.readouterr().out
    )


@pytest.mark.parametrize("backend", ["xla", "cpu"])
def test_upstreams_config_has_a_report(runs, monkeypatch, backend):
    monkeypatch.setattr(ExtensionArguments, "run_report", True)
    runs.ours(max_steps=2, use_cpu=backend == "cpu")
    assert (runs.output_dir / "report.html").is_file()
    assert read_run(runs.output_dir).begin["backend"]["name"] == backend


@pytest.mark.parametrize("use_cpu", [False, True])
@pytest.mark.parametrize("name", [name for name in hf_tpu_ext.__all__ if name.endswith(("Config", "Arguments"))])
def test_what_was_left_out_is_not_listed(tmp_path, name, use_cpu):
    config_cls = getattr(hf_tpu_ext, name)
    settings = config_cls(output_dir=str(tmp_path), use_cpu=use_cpu)
    assert _changed_fields(settings) == ["output_dir"] + ["use_cpu"] * use_cpu
    # What it takes with others: their values were not left out either.
    settings = config_cls(
        str(tmp_path), gradient_checkpointing=not config_cls.gradient_checkpointing, eval_strategy="epoch"
    )
    assert _changed_fields(settings) == ["output_dir", "activation_checkpointing", "eval_strategy"]


def test_what_was_set_of_an_adapter(tiny_model):
    """Also of one whose config cannot be made without a value; and the rank and lora_alpha, where they were left at the default, too."""
    for config, expected in (
        (LoraConfig(r=3, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM"), {"r": 3, "lora_alpha": 8}),
        (LoraConfig(r=8, lora_alpha=32, target_modules=["v_proj", "q_proj"]), {"r": 8, "lora_alpha": 32}),
        (
            AdaLoraConfig(total_step=9, target_modules=["v_proj", "q_proj"]),
            {"init_r": 12, "lora_alpha": 8, "total_step": 9},
        ),
    ):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config)
        expected = {f"peft_config.{name}": value for name, value in expected.items()}
        assert _settings_of_adapter(model) == {**expected, "peft_config.target_modules": ["q_proj", "v_proj"]}
    assert _settings_of_adapter(model.get_base_model()) == {}


class ClipsHarder(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.trainer.args.max_grad_norm = 1e-3


def test_what_ended_a_run_with_an_error_is_told(runs):
    trainer = runs.ours(**CONFIG, max_recompiles=0, train=False)
    clips = ClipsHarder()
    clips.trainer = trainer
    trainer.add_callback(clips)
    with pytest.raises(TooManyRecompiles) as raised:
        trainer.train()
    run = read_run(runs.output_dir)
    assert run.sessions[-1].end is None and run.sessions[-1].error == f"TooManyRecompiles: {raised.value}"
    assert "max_grad_norm` was 1.0, is 0.001" in run.programs[-1]["cause"] and run.steps == 3
    page = (runs.output_dir / "report.md").read_text()
    assert "The run was ended after step 3 by TooManyRecompiles: step 4: recompilation of the training step" in page


class FailsInTheSecondStep(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise RuntimeError("the user's own")


@pytest.mark.parametrize("breaks", [False, True])
def test_an_error_before_a_step_was_timed_is_the_one_that_is_raised(runs, monkeypatch, caplog, breaks):
    if breaks:
        monkeypatch.setattr(make, "read_run", lambda directory: {}["a key"])
    trainer = runs.ours(**CONFIG, logging_first_step=True, train=False, kwargs={"callbacks": [FailsInTheSecondStep()]})
    with pytest.raises(RuntimeError, match="the user's own"):
        trainer.train()
    assert not read_run(runs.output_dir).step_times
    assert (runs.output_dir / "report.md").is_file() == (not breaks)
    assert ("There is no report of this run: 'a key'" in caplog.text) == breaks


class ExplainLater(TrainerCallback):
    """Finds out a step later why a program was compiled."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            events = self.trainer.watch.events
            events[-1] = replace(events[-1], cause="a planted cause")


def test_which_weights_were_loaded_at_the_end(runs):
    config = dict(CONFIG, load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps", max_steps=2)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(runs.model_dir))
    model.config.name_or_path = ""
    trainer = runs.ours(model=model, use_cpu=True, eval_steps=1, save_steps=1, **config)
    report = (runs.output_dir / "report.md").read_text()
    step = trainer.state.best_global_step
    loss = trainer.state.best_metric
    assert f"The weights of step {step}, the best by eval_loss ({loss:.3g}), were loaded at the end" in report
    # The model was made of a config, without a name.
    assert "- Qwen3ForCausalLM: " in report


def test_a_cause_that_is_found_later(runs):
    callback = ExplainLater()
    callback.trainer = runs.ours(**CONFIG, lora={"r": 5}, kwargs={"callbacks": [callback]}, train=False)
    callback.trainer.train()
    causes = [program["cause"] for program in read_run(runs.output_dir).programs]
    assert causes == [*[None] * (len(causes) - 1), "a planted cause"]


def test_none_is_made_where_none_is_wanted(runs):
    runs.ours(config_cls=TPUSFTConfig, run_report=False, max_steps=2)
    assert not list(runs.output_dir.glob("re*.*")) and not (runs.output_dir / RECORD_NAME).exists()


def test_a_record_without_status(runs):
    runs.ours(**CONFIG, step_status=False)
    run = read_run(runs.output_dir)
    assert len(run.logs) == 3 and not run.phases and (runs.output_dir / "report.html").is_file()
    assert not time_of_step(run)
    assert "were not measured: step_status is false." in (runs.output_dir / "report.md").read_text()


class _Looks(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        pass


@pytest.mark.ci
def test_why_steps_are_traced_is_told_as_on_the_screen(runs, caplog):
    runs.ours(**CONFIG, kwargs={"callbacks": [_Looks()]})
    (said,) = [record.message for record in caplog.records if "Step replay is off" in record.message]
    run = read_run(runs.output_dir)
    assert "_Looks" in run.why_traced and f"every step is traced: {run.why_traced}. " in said
    assert f"Step replay is off: {run.why_traced}." in (runs.output_dir / "report.md").read_text().replace("\\_", "_")
    # Silenced, it is in the report still.
    runs.ours(**{**CONFIG, "max_steps": 2}, step_replay=False)
    assert read_run(runs.output_dir).why_traced == "step_replay=False"


@pytest.mark.ci
def test_a_resumed_run(runs):
    config = {**CONFIG, "save_strategy": "steps", "save_steps": 2, "show_samples": 1}
    runs.ours(**config)
    assert [*read_run(runs.output_dir).samples[0]] == ["prompt", "reference", "before", "after"]
    trainer = runs.ours(**{**config, "max_steps": 8}, train=False)
    trainer.train(resume_from_checkpoint=str(runs.output_dir / "checkpoint-4"))
    run = read_run(runs.output_dir)
    # The answer of the untrained model is that of the first session.
    assert [*run.samples[0]] == ["prompt", "reference", "before", "at step 4", "after"]
    assert [session.begin["first_step"] for session in run.sessions] == [0, 4]
    assert [entry["step"] for entry in run.logs] == [2, 4, 6, 8]
    assert "The run was ended after step 6, and resumed after step 4" in (runs.output_dir / "report.md").read_text()
    assert run.counters["executions"] == sum(session.end["counters"]["executions"] for session in run.sessions) > 8


class _EndsEarly(TrainerCallback):
    def __init__(self, sends_signal):
        self.sends_signal = sends_signal

    def on_step_end(self, args, state, control, **kwargs):
        if self.sends_signal:
            signal.raise_signal(signal.SIGTERM)
        else:
            control.should_training_stop = True


@pytest.mark.parametrize(
    ("sends_signal", "by"),
    [(True, "SIGTERM"), (False, "a callback (early stopping is one)")],
    ids=["signal", "callback"],
)
def test_what_has_stopped_a_run_is_told(runs, sends_signal, by):
    with pytest.raises(TrainingPreempted) if sends_signal else contextlib.nullcontext():
        runs.ours(**CONFIG, kwargs={"callbacks": [_EndsEarly(sends_signal)]})
    assert read_run(runs.output_dir).sessions[0].end["stopped_by"] == by
    assert f"Training stopped after step 1 of 6, by {by}." in (runs.output_dir / "report.md").read_text()


class _Stops(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        raise RuntimeError


def test_the_first_answers_of_a_run_that_has_no_end(runs):
    with pytest.raises(RuntimeError):
        runs.ours(**CONFIG, show_samples=2, kwargs={"callbacks": [_Stops()]})
    assert [[*row] for row in read_run(runs.output_dir).samples] == [["prompt", "reference", "before"]] * 2
    assert "reference | before" in (runs.output_dir / "report.md").read_text()


class TakeAway(TrainerCallback):
    """Puts a directory in the place of the record, so that it cannot be written any more."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            record = self.output_dir / RECORD_NAME
            record.rename(record.with_suffix(".taken"))
            record.mkdir()


def test_a_record_that_cannot_be_written_is_done_without(runs, caplog):
    callback = TakeAway()
    callback.output_dir = runs.output_dir
    with caplog.at_level("WARNING"):
        trainer = runs.ours(**CONFIG, kwargs={"callbacks": [callback]})
    assert sum("Training continues" in text for text in caplog.messages) == 1
    undisturbed = runs.ours(config_cls=TPUSFTConfig, max_steps=6, logging_steps=2)
    for mine, other in zip(trainer.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(mine.cpu(), other.cpu())


class InTheWay(TrainerCallback):
    """Puts a directory where the report is to be, which is moved if it is there when the run begins."""

    def on_train_begin(self, args, state, control, **kwargs):
        Path(args.output_dir, "report.html").mkdir()


def test_a_report_that_cannot_be_written_costs_a_line(runs, caplog):
    with caplog.at_level("WARNING"):
        trainer = runs.ours(**CONFIG, kwargs={"callbacks": [InTheWay()]})
    (line,) = [text for text in caplog.messages if "no report" in text]
    assert "cannot be written" in line and f"hf-tpu report {runs.output_dir}" in line
    assert trainer.state.global_step == 6 and len(read_run(runs.output_dir).logs) == 3


def test_a_clock_that_goes_back(runs, monkeypatch):
    """That of the day, which somebody sets. Durations are taken from one that only goes forward."""
    seconds = itertools.count(2_000_000_000, -60)
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    trainer = runs.ours(**CONFIG)
    for entry in trainer.state.log_history:
        assert all(value >= 0 for name, value in entry.items() if name.startswith(("phase/", "step_time", "tokens_")))
    ats = [json.loads(line)["at"] for line in (runs.output_dir / RECORD_NAME).read_text().splitlines()]
    assert 0 <= ats[0] and all(before <= after for before, after in itertools.pairwise(ats))
    assert (runs.output_dir / "report.html").is_file()
