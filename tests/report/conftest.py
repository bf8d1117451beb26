"""Made records of runs."""

import pytest

from hf_tpu_ext.report import comparison, sections
from hf_tpu_ext.report.record import RecordWriter


VERSIONS = {"python": "3.11.2", "hf_tpu_ext": "0.1.0", "torch": "2.9.1"}


def begin(first_step=0, **facts):
    return {
        "at": 0.0,
        "time": "2026-11-20T10:00:00+00:00",
        "first_step": first_step,
        "max_steps": 40,
        "versions": VERSIONS,
        "arguments": {"output_dir": "runs/a", "learning_rate": 1e-3, "max_length": 64},
        "changed": ["learning_rate", "output_dir"],
        "model": {"name": "tiny", "parameters": 1000, "trained": 10},
        "datasets": {"train_dataset": "chat"},
        "rows": {"train_dataset": 20},
        "backend": {"name": "xla", "device": "TPU v5e", "reason": "found", "chips": 8, "memory_per_chip": 16 * 2**30},
        "facts": {"precision": "float32 weights", "changes": ["fsdp has no effect"], "token_waste": "20 rows"},
        **facts,
    }


def log(step, at, number=1, why_traced=None, **logs):
    """The log with this number: phases, step times, batches and counters are those of the session until then."""
    return {
        "at": at,
        "step": step,
        "logs": {"loss": 3.0 - step / 20, "learning_rate": 1e-3 / (1 + step), "grad_norm": 1.0, **logs},
        "phases": {"data": 0.1 * number, "replay": 0.3 * number, "compile": 1.0 * number, "eval": 0.2 * number},
        "step_times": {
            "data": {"-40": 5 * number},
            "replay": {"-25": 4 * number, "-24": number},
            # The last step's ends after its log.
            "total": {"-25": 3 * number, "-24": 2 * number - 1},
        },
        "batches": [
            [[4, 16], [6 * number, 300 * number, 384 * number]],
            [[4, 64], [4 * number, 700 * number, 1024 * number]],
        ],
        "counters": {**END["counters"], "executions": step - 1, "replays": 0 if why_traced else step - 2},
        "why_traced": why_traced,
        "syncs": ["`.item()` syncs device to host [mine.py:9]"] if why_traced else [],
    }


def program(at, **values):
    return {
        "at": at,
        "step": 1,
        "kind": "training step",
        "shape": [4, 16],
        "seconds": 2.0,
        "compiled": True,
        "cause": None,
        "advice": None,
        **values,
    }


END = {
    "step": 40,
    "counters": {
        "compiles": 1,
        "compile_seconds": 2.0,
        "executions": 40,
        "reads": 8,
        "fallbacks": 0,
        "replays": 38,
        "loads": 0,
    },
    "cache": None,
}


@pytest.fixture(scope="module", autouse=True)
def same_figures_are_drawn_once():
    """A report takes a moment, and each of its figures as long: tests that do not look at them share those of equal records."""
    drawn = {}

    def once(draw):
        def find_or_draw(*args, **kwargs):
            key = repr((draw.__name__, args, kwargs))
            if key not in drawn:
                drawn[key] = draw(*args, **kwargs)
            return drawn[key]

        return find_or_draw

    with pytest.MonkeyPatch.context() as patch:
        for module in (comparison, sections):
            for name, function in list(vars(module).items()):
                if name.startswith("draw_"):
                    patch.setattr(module, name, once(function))
        yield


@pytest.fixture
def write_run():
    """Writes the record of a run of 40 steps with a log every 5."""

    def write(
        directory,
        steps=40,
        first_step=0,
        end=True,
        anew=True,
        logs=None,
        held_out=None,
        causes=(),
        why_traced=None,
        **facts,
    ):
        directory.mkdir(exist_ok=True)
        writer = RecordWriter(directory, anew)
        writer.write("begin", **begin(first_step, **facts))
        for cause in (None, *causes):
            writer.write("program", **program(2.5, cause=cause, advice=cause and f"Advice on {cause}."))
        for index, step in enumerate(range(first_step + 5, steps + 1, 5)):
            speed = dict(tokens_per_second=5000.0, padded_tokens_per_second=8000.0, step_time=0.02, peak_memory_gb=2.5)
            writer.write(
                "log", **log(step, 3.0 + 10 * (index + 1), index + 1, why_traced, **{**speed, **(logs or {})})
            )
        if end:
            before = len(range(first_step + 5, steps + 1, 5))
            held_out = {"eval_loss": 2.0, **(held_out or {}), "eval_runtime": 1.0}
            last = log(steps, 100.0, before, why_traced)
            writer.write("log", **{**last, "logs": held_out})
            writer.write("log", **{**last, "logs": {"train_loss": 2.0}})
            last["phases"]["save"] = 0.5
            last["step_times"]["total"]["-24"] += 1
            writer.write("end", **{**last, **END, "at": 3600.0, "step": steps})
        return directory

    return write
