"""
Files of this package that a training step visits, by a profile: one step that is replayed, and one that is traced.

A visit of a file begins with a call from another file, and ends with the return of that call. Calls of upstream's into this package
begin a story of their own, by the name of the function that is called. Within a story no file should be visited again.
"""

import contextlib
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import TrainerCallback

import hf_tpu_ext
from hf_tpu_ext import TPUSFTConfig


ROOT = f"{Path(hf_tpu_ext.__file__).parent}/"
# By step: files that are visited, and how often one is visited again. Numbers that may only fall, but for a new stage.
MOST = {"replayed": (23, 14), "traced": (46, 78)}


class Visits(TrainerCallback):
    """Notes the visits of one step, from its beginning to that of the next one."""

    # As a callback of transformers, which keeps no copies of weights.
    __module__ = TrainerCallback.__module__

    def __init__(self, steps, step):
        self._steps, self._step = steps, step
        #: Whether the step was replayed.
        self.replays = None
        #: By the function that upstream calls: the files of each call, in the order of their visits.
        self.stories: dict[str, list[list[str]]] = {}
        # Of each call that has not returned: its story, and its file.
        self._under_way = []

    def on_step_begin(self, args, state, control, **kwargs):
        sys.setprofile(self._note if state.global_step + 1 == self._step else None)
        if state.global_step == self._step:
            self.replays = self._steps.replays

    def _note(self, frame, event, _):
        if event not in ("call", "return"):
            return
        file = frame.f_code.co_filename
        if not file.startswith(ROOT) or (event == "return" and not self._under_way):
            return
        if event == "return":
            self._under_way.pop()
            return
        name, caller = file.removeprefix(ROOT), frame.f_back
        while caller.f_code.co_filename == contextlib.__file__:
            caller = caller.f_back
        is_ours = caller.f_code.co_filename.startswith(ROOT) and frame.f_code.co_name != "__torch_function__"
        if is_ours and self._under_way:
            story, before = self._under_way[-1]
        else:
            story, before = [], None
            self.stories.setdefault(f"{name}: {frame.f_code.co_name}", []).append(story)
        if name != before:
            story.append(name)
        self._under_way.append((story, name))


@pytest.mark.parametrize("kind, step", [("traced", 2), ("replayed", 5)])
def test_files_that_a_step_visits(runs, kind, step):
    trainer = runs.ours(train=False, config_cls=TPUSFTConfig, step_replay=True, logging_steps=100, max_steps=6)
    visits = Visits(trainer.steps, step)
    trainer.add_callback(visits)
    trainer.train()
    assert sys.getprofile() is None and visits.replays == (kind == "replayed")
    calls = [Counter(files) for calls in visits.stories.values() for files in calls]
    files, again = set().union(*calls), sum(call.total() - len(call) for call in calls)
    most_files, most_again = MOST[kind]
    told = "\n".join(
        f"{name} ({len(calls)}): {', '.join(map(str, Counter(calls[0]).items()))}"
        for name, calls in visits.stories.items()
    )
    assert len(files) <= most_files and again <= most_again, f"{len(files)} files, {again} visits again\n{told}"
