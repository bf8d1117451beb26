"""What has a program compiled again is named, by what has changed and by its line."""

import itertools
import re

import pytest
import torch
from planted import ROWS, Tiny, causes, collate, collate_then, line_of
from transformers import TrainerCallback

from hf_tpu_ext import TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.watch import compilations
from hf_tpu_ext.watch.compilations import TooManyRecompiles


# ---- All is well ----


def test_nothing_is_said_and_nothing_is_added_when_all_is_well(train, lines, capsys):
    trainer = train(logging_steps=4, start=False, step_replay=True)
    before = trainer.backend.counters()
    trainer.train()
    spent = trainer.backend.counters() - before
    assert lines() == []
    assert trainer.watch.recompiles == 0 and causes(trainer) == []
    out = capsys.readouterr().out
    assert "Recompilations" not in out and "Device-to-host syncs" not in out
    # The optimizer's state and eight steps; two logs and what is left at the end.
    assert (spent.executions, spent.reads, spent.fallbacks, spent.replays) == (9, 3, 0, 6)
    programs = [event for event in trainer.watch.events if event.kind == "training step"]
    assert [(event.step, event.shape, event.compiled, event.cause) for event in programs] == [(1, (4, 8), True, None)]
    assert programs[0].seconds > 0
    assert sum(event.compiled for event in trainer.watch.events) == spent.compiles


def test_a_log_file_has_no_escapes_of_a_terminal(train, capsys):
    """Below the progress bar of a run, which is upstream's, they move the cursor."""
    train(disable_tqdm=False)
    error = capsys.readouterr().err
    assert "compiled the training step 4 x 8" in error
    assert "compiling the" not in error and "\x1b" not in error


def test_without_progress_bars_only_long_compilations_are_told(train, capsys, monkeypatch):
    train(max_steps=1)
    assert "compiled the" not in capsys.readouterr().err
    monkeypatch.setattr(compilations, "_LONG", 1e-6)
    train(max_steps=1)
    assert re.fullmatch(r"compiled the training step 4 x 8 in \d+\.\d s\n", capsys.readouterr().err)


def test_every_compile_is_counted_and_timed(train):
    class Sums(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            self.sum = model.head.weight.sum().item()

    trainer = train(start=False, callbacks=[Sums()], eval_dataset=ROWS[:10], eval_strategy="steps", eval_steps=4)
    before = trainer.backend.counters()
    trainer.train()
    spent = trainer.backend.counters() - before
    assert len(trainer.watch.events) == spent.compiles
    assert sum(event.seconds for event in trainer.watch.events) >= spent.compile_seconds * 0.9
    assert {event.kind for event in trainer.watch.events} >= {"training step", "evaluation step"}


# ---- The batch ----


def test_ragged_batches_are_padded(train, lines):
    ragged = [{key: value[: 3 + index % 5] for key, value in row.items()} for index, row in enumerate(ROWS)]

    def pad(examples):
        longest = max(len(example["input_ids"]) for example in examples)
        return collate([{k: v + [0] * (longest - len(v)) for k, v in example.items()} for example in examples])

    trainer = train(collator=pad, train_dataset=ragged)
    assert trainer.watch.recompiles == 0 and lines() == []


def test_a_ragged_batch_is_refused_where_lengths_are_not_known(train):
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(
                [{key: value[: 8 - index // 4] for key, value in row.items()} for index, row in enumerate(ROWS)]
            )

    with pytest.raises(ValueError, match=r"`input_ids` was \(4, 8\) in the first batch and is \(4, 7\) now"):
        train(train_dataset=Rows(), max_length=None, max_steps=4)


def test_a_ragged_batch_in_the_loss(train, lines):
    class Cuts(TPUTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            length = 7 if self.state.global_step < 4 else 6
            inputs = {key: value[:, :length] for key, value in inputs.items()}
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = train(Cuts)
    ((step, cause),) = causes(trainer)
    assert step == 5
    # The program is compared with the one before when it runs again.
    first, second = lines()
    assert "in Cuts.compute_loss, which begins at test_compilations.py:" in first
    assert cause.startswith("`slice` was s64[4,7] ") and cause in second
    assert f"[{line_of(Cuts, 'value[:, :length]')}]" in cause


@pytest.mark.ci
def test_a_loss_that_cuts_at_another_place_in_each_step(train, lines):
    """Each cause names what the step before had, where that was listed, or the step that had it."""

    class Cuts(TPUTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            length = self.lengths_of_steps[self.state.global_step]
            inputs = {key: value[:, :length] for key, value in inputs.items()}
            return super().compute_loss(model, inputs, *args, **kwargs)

    def slices_of(*lengths):
        """The lengths before and after that each cause names, and the step that is said to have had the first."""
        Cuts.lengths_of_steps = lengths
        found = [cause for _, cause in causes(train(Cuts, max_steps=len(lengths)))]
        return [re.findall(r"s64\[4,(\d)\]|at step (\d)", cause) for cause in found]

    assert slices_of(4, 5, 6, 7, 4, 5) == [[("4", ""), ("5", "")], [("5", ""), ("6", "")], [("6", ""), ("7", "")]]
    # Step 5 was not listed: nothing told that it would be another program.
    assert slices_of(3, 3, 3, 3, 5, 6, 3, 5) == [[], [("3", ""), ("", "2"), ("6", "")]]


def test_a_dtype_that_flips(train, lines):
    trainer = train(collator=collate_then(5, lambda batch: batch.update(labels=batch["labels"].int())))
    ((step, cause),) = causes(trainer)
    assert step == 5 and trainer.watch.recompiles == 1
    assert cause.startswith("`labels` was int64, is int32 (planted, planted.py:")
    (line,) = lines()
    assert line.startswith("step 5: recompilation of the training step for batches of 4 x 8")
    assert line.endswith("Yield one dtype in every batch.")


def test_a_collator_around_the_trainers_own_is_named(train, lines):
    class Outer:
        def __init__(self, inner):
            self.inner, self.calls = inner, itertools.count(1)

        def __call__(self, examples):
            batch = self.inner(examples)
            return {**batch, "labels": batch["labels"].int()} if next(self.calls) == 5 else batch

    trainer = train(start=False)
    trainer.data_collator = Outer(trainer.data_collator)
    trainer.train()
    assert f"`labels` was int64, is int32 (Outer, {line_of(Outer, 'class Outer')})" in lines()[0]


def add_mask(batch):
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])


class WithoutMask(TPUTrainer):
    """As a trainer that adds no mask of its own."""

    def _make_batches_static(self):
        pass


def test_a_mask_is_always_there(train, lines):
    trainer = train(collator=collate_then(5, add_mask))
    assert trainer.watch.recompiles == 0 and lines() == []


def test_a_mask_in_some_batches(train):
    with pytest.raises(ValueError, match="`attention_mask` was absent in the first batch and is"):
        train(WithoutMask, collator=collate_then(5, add_mask))


def test_a_mask_in_some_batches_of_several_lengths(train, lines):
    trainer = train(WithoutMask, collator=collate_then(5, add_mask), length_buckets=[4, 8])
    ((step, cause),) = causes(trainer)
    assert step == 5 and cause.startswith("`attention_mask` is in the batch, and was not (planted, planted.py:")
    assert lines()[0].endswith("Yield the same keys in every batch.")


def test_a_custom_collator_with_another_shape(train, lines):
    def widen(batch):
        batch["weight"] = torch.ones(4, 8, 1)

    def narrow(batch):
        batch["weight"] = torch.ones(4, 1, 1)

    calls = itertools.count(1)

    def planted(examples):
        batch = collate(examples)
        (widen if next(calls) == 5 else narrow)(batch)
        return batch

    trainer = train(WithoutMask, collator=planted, length_buckets=[4, 8], remove_unused_columns=False)
    ((step, cause),) = causes(trainer)
    assert step == 5 and cause.startswith("`weight` was (4, 1, 1), is (4, 8, 1) (planted, ")
    assert "Pad `weight` to one shape in the data collator." in lines()[0]


def test_an_extra_column_of_python_numbers(train, lines):
    weights = iter([2.0, 2.0, 2.0, 2.0, 1.0, 2.0, 2.0, 2.0, 2.0])

    def planted(examples):
        return {**collate(examples), "weight": next(weights)}

    trainer = train(collator=planted, remove_unused_columns=False)
    ((step, cause),) = causes(trainer)
    assert step == 5 and cause.startswith("`weight` was 2.0, is 1.0 (planted, ")
    assert "yield `weight` as a tensor, or leave it out of the batch" in lines()[0]


def test_an_extra_column_of_the_data_is_removed(train, lines):
    trainer = train(train_dataset=[{**row, "number": index} for index, row in enumerate(ROWS)])
    assert trainer.watch.recompiles == 0 and lines() == []


def test_evaluation_on_a_new_shape(train):
    trainer = train()
    longer = [{key: value * 2 for key, value in row.items()} for row in ROWS[:8]]
    with pytest.raises(ValueError, match="16"):
        trainer.evaluate(longer)


def test_evaluation_on_a_new_shape_in_a_callback(train, lines):
    class Evaluates(TrainerCallback):
        def on_log(self, args, state, control, model, **kwargs):
            rows = torch.ones(2, state.global_step, dtype=torch.int64, device="xla")
            with torch.no_grad():
                self.loss = model(rows, rows)["loss"].item()

    trainer = train(callbacks=[Evaluates()])
    place = line_of(Evaluates, ".item()")
    # In the logs after steps 2, 4, 6 and 8, the first of which is no recompile.
    assert causes(trainer) == [(step, f"{place} compiles another graph") for step in (4, 6, 8)]
    assert sum(f"{place} compiles another graph" in line for line in lines()) == 3
    assert any(f"`.item()` syncs device to host [{place}]" in line for line in lines())


# ---- The step ----


def test_a_python_number_that_becomes_a_constant(train, lines):
    class Warms(TPUTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * min(1.0, self.state.global_step / 4)

    trainer = train(Warms)
    number = line_of(Warms, "min(1.0")
    assert causes(trainer) == [
        (2, f"a scalar of the graph was 0, is another value [{number}]"),
        (5, f"a scalar of the graph was another value, is 1 [{number}]"),
    ]
    assert "trainer.backend.send(torch.tensor(value))" in lines()[0]


def test_a_number_after_a_setting_that_has_changed_the_program(train):
    """It is compared with the program that ran before it, and not with that of the first steps."""

    class DrawsDropout(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            if state.global_step == 3:
                model.dropout = 0.5

    class Weighs(TPUTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * (2.5 if self.state.global_step < 6 else 1.0)

    number = line_of(Weighs, "2.5 if")
    assert causes(train(Weighs, callbacks=[DrawsDropout()], max_steps=8)) == [
        (4, "`model.dropout` was 0.0, is 0.5"),
        (7, f"a scalar of the graph was another value, is 1 [{number}]"),
    ]


def test_a_number_that_each_step_changes_is_named(train):
    """Until a graph was compiled again, nobody knows the lines of operators."""

    class Fills(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            model.scale = 1.0 if state.global_step == 5 else 2.5 + 0.1 * state.global_step

    trainer = train(callbacks=[Fills()], max_steps=9)
    ((step, cause),) = causes(trainer)
    assert step == 6 and "a Python number or a branch changed in code of yours: the model is a Tiny" in cause
    assert cause.endswith("(between earlier steps, `model.scale` was 2.5, is 2.6)")
    (event,) = (event for event in trainer.watch.events if event.cause is not None)
    assert event.advice.startswith("torch_xla folds 0, 1 and -1")


def test_an_exponent_whose_gradient_is_computed_otherwise(train):
    class Raises(TPUTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs).pow(self.state.global_step)

    number = line_of(Raises, "pow(")
    assert causes(train(Raises, max_steps=3)) == [
        (2, f"a scalar of the graph was 0, is 1 [{number}]"),
        (3, f"a scalar of the graph was 1, is 2 [{number}]"),
    ]


@pytest.mark.parametrize(
    ("numbers", "step", "words"),
    [
        ((1.5, 0.3, 0.4), 2, "was equal to another number of the graph, and is not"),
        ((0.3, 0.4, 1.5, 1.5), 3, "is equal to another number of the graph, and was not"),
    ],
    ids=["at first", "later"],
)
def test_a_python_number_that_equals_another(train, lines, numbers, step, words):
    """It is one parameter with the model's `scale`, which is 1.5, too."""

    class Weighs(TPUTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * self.weigh(numbers[self.state.global_step])

        def weigh(self, number):
            return number

    both = f"{line_of(Tiny.forward, 'self.scale')}, {line_of(Weighs, 'loss * self')}"
    assert causes(train(Weighs, max_steps=len(numbers))) == [(step, f"a Python number {words} [{both}]")]
    assert "trainer.backend.send(torch.tensor(value))" in "".join(lines())

    class Sends(Weighs):
        def weigh(self, number):
            return self.backend.send(torch.tensor(number))

    assert causes(train(Sends, max_steps=len(numbers))) == []


def test_a_python_number_beside_another_of_the_same_operator(train):
    """Of the loss, which is multiplied by both."""
    numbers = (0.3, 0.4, 1.5, 1.5, 0.0, 0.0)

    class Weighs(TPUTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            weighted = loss * numbers[self.state.global_step]
            return weighted + 0.01 * loss

    scale, number = line_of(Tiny.forward, "self.scale"), line_of(Weighs, "loss * numbers")
    equals, folded = causes(train(Weighs, max_steps=len(numbers)))
    assert equals[0] == 3
    assert equals[1].startswith(
        f"a Python number is equal to another number of the graph, and was not [{scale}, {number}"
    )
    assert folded == (5, f"a scalar of the graph was another value, is 0 [{number}]")


def test_what_each_step_changes_is_no_cause(train):
    class Keeps(TPUTrainer):
        def compute_loss(self, model, *args, **kwargs):
            model.kept = object()
            return super().compute_loss(model, *args, **kwargs) * min(1.0, self.state.global_step / 4)

    number = line_of(Keeps, "min(1.0")
    assert causes(train(Keeps)) == [
        (2, f"a scalar of the graph was 0, is another value [{number}]"),
        (5, f"a scalar of the graph was another value, is 1 [{number}]"),
    ]


def test_a_program_that_is_traced_since_replay_has_ended(train, lines):
    """Its line is that on replay: the recompile is in the events, and is not told of or counted again."""

    class Changes(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            args.max_grad_norm = 1.0 + state.global_step

    trainer = train(callbacks=[Changes()], step_replay=True)
    because = "replay is off from here on, and a graph that is traced each time is another one: `trainer.args.max_grad_norm` was 5.0"
    (ended,) = [cause for _, cause in causes(trainer) if cause.startswith(because)]
    assert ended not in "".join(lines()) and trainer.watch.recompiles == len(causes(trainer)) - 1


@pytest.mark.parametrize(
    ("first", "then", "words", "at"),
    [
        (
            lambda loss, model: loss,
            lambda loss, model: loss + model.head.weight.square().sum(),
            "the step computes `aten::pow` of f32[16,",
            "square",
        ),
        # A line of the model is not that of the branch.
        (lambda loss, model: loss.pow(2), lambda loss, model: loss.tanh(), "the step computes `aten::tanh`", "tanh"),
        # Each takes a number, too.
        (
            lambda loss, model: loss.sigmoid() * 0.5,
            lambda loss, model: loss.exp() + 1,
            "the step computes `aten::exp`",
            "exp()",
        ),
        (
            lambda loss, model: loss.pow(3),
            lambda loss, model: loss.pow(2).tanh(),
            "the step computes `aten::tanh`",
            "tanh",
        ),
    ],
    ids=["pow", "pow or tanh", "with numbers", "with another exponent"],
)
def test_a_branch(train, first, then, words, at):
    class Branches(TPUTrainer):
        def compute_loss(self, model, *args, **kwargs):
            loss = super().compute_loss(model, *args, **kwargs)
            return (then if self.state.global_step >= 2 else first)(loss, model)

    ((step, cause),) = causes(train(Branches, max_steps=4))
    assert step == 3 and cause.startswith(words) and cause.endswith(f"[{line_of(then, at)}]")


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_learning_rate_of_zero(train, lines, optim):
    trainer = train(optim=optim, warmup_steps=3, learning_rate=0.01)
    if optim == "adamw_torch":
        assert trainer.watch.recompiles == 0 and lines() == []
    else:
        assert causes(trainer) == [(2, "`lr of group 0` of SGD was 0, is neither 0, 1 nor -1")]
        assert "use optim=adamw_torch, which takes it as a tensor" in lines()[0]


class SetsWeightDecay(TrainerCallback):
    """Sets it for step 5, as a schedule of one's own does."""

    def __init__(self, event):
        setattr(self, event, self.change)

    def change(self, args, state, control, optimizer, **kwargs):
        if state.global_step == 4:
            # The other one has those that do not decay.
            optimizer.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.parametrize(
    ("event", "step_replay"),
    [
        ("on_step_begin", None),
        ("on_step_end", None),
        pytest.param("on_step_begin", False, marks=pytest.mark.slow),
        ("on_step_end", False),
    ],
)
def test_a_weight_decay_that_begins_on_the_way(train, lines, event, step_replay):
    trainer = train(callbacks=[SetsWeightDecay(event)], weight_decay=0.0, step_replay=step_replay)
    assert causes(trainer) == [(5, "`weight_decay of group 0` of LazyAdamW was 0, is not 0")]
    assert "Zero and nonzero are different graphs: set it before training." in lines()[0]


def test_a_weight_decay_that_changes_is_data(train, lines):
    trainer = train(callbacks=[SetsWeightDecay("on_step_begin")], weight_decay=0.1)
    assert trainer.watch.recompiles == 0 and lines() == []


def test_an_optimizer_that_makes_its_state_in_the_first_step(train):
    ((step, cause),) = causes(train(optimizer=(torch.optim.Adam, {"lr": 1e-3})))
    assert step == 2 and cause.startswith("Adam creates its state in the first step")


class AtStep(TrainerCallback):
    """Changes the model before step 5."""

    def __init__(self, change):
        self.change = change

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == 4:
            self.change(model)


def freeze(model):
    for parameter in model.embedding.parameters():
        parameter.requires_grad_(False)


def shorten(model):
    model.embedding.to(torch.bfloat16)


def rescale(model):
    # Any other number than 0, 1 and -1 would be sent as a tensor.
    model.scale = 1.0


@pytest.mark.parametrize(
    "change, cause",
    [
        (freeze, "`model.embedding.weight` was trained, is frozen"),
        (shorten, "`model.embedding.weight` was float32, is bfloat16"),
        (rescale, "`model.scale` was 1.5, is 1.0"),
    ],
    ids=["trained parameters", "dtype", "setting"],
)
def test_a_model_that_changes(train, lines, caplog, change, cause):
    trainer = train(callbacks=[AtStep(change)])
    assert (5, cause) in causes(trainer)
    assert len(lines()) == len(causes(trainer)) == 1
    # Said once, also where steps are replayed.
    assert "traced again" not in caplog.text


def test_a_weight_of_another_dtype_is_another_program_of_replayed_steps(train):
    trainer = train(callbacks=[AtStep(shorten)], step_replay=True)
    assert causes(trainer)[0] == (5, "`model.embedding.weight` was float32, is bfloat16")
    assert trainer.state.global_step == 8


# ---- A limit ----


def test_max_recompiles(train):
    with pytest.raises(TooManyRecompiles, match="`model.scale` was 1.5, is 1.0.*max_recompiles=0"):
        train(callbacks=[AtStep(rescale)], max_recompiles=0)
    assert train(callbacks=[AtStep(rescale)], max_recompiles=1).watch.recompiles == 1


@pytest.mark.ci
@pytest.mark.parametrize("logging_steps", [1, 100])
def test_max_recompiles_counts_what_callbacks_leave_unread(train, logging_steps):
    """The trainer computes it, where a log is read or before the next step."""

    class Keeps(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            self.kept = model.head.weight.sum() * torch.ones(self.length(state.global_step), device="xla").cumsum(0)

        def length(self, step):
            return 2 + step

    class Pads(Keeps):
        def length(self, step):
            return 2

    config = dict(max_steps=12, logging_steps=logging_steps, max_recompiles=0)
    place = line_of(Keeps, "class Keeps")
    with pytest.raises(
        TooManyRecompiles, match=rf"another graph \(callbacks: Keeps, {place}\)\. Keep the shapes.*max_recompiles=0"
    ):
        train(callbacks=[Keeps()], **config)
    assert train(callbacks=[Pads()], **config).watch.recompiles == 0


def test_a_negative_limit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_recompiles=-1 is negative. Set it to 0 to allow none"):
        TPUTrainingArguments(str(tmp_path), max_recompiles=-1)


def test_a_limit_has_no_effect_where_nothing_is_compiled(train, capsys):
    train(backend="cpu", max_recompiles=3, max_steps=1)
    assert "max_recompiles=3 has no effect on cpu: nothing is compiled" in capsys.readouterr().out


@pytest.mark.ci
def test_lines_about_one_program_come_to_an_end(train, lines):
    class Cuts(TPUTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            length = 8 - self.state.global_step
            return super().compute_loss(model, {k: v[:, :length] for k, v in inputs.items()}, *args, **kwargs)

    trainer = train(Cuts)
    assert trainer.watch.recompiles == len(causes(trainer)) == 7
    assert sum("recompilation of the training step" in line for line in lines()) == 5
    assert any(line.endswith("Further ones like these are only counted.") for line in lines())
    # Those that the end of the run names add up, too.
    summary = trainer.watch.describe()
    assert summary.startswith("Recompilations: 7 in ")
    assert [int(number) for number in re.findall(r"\((\d)x\)", summary)] == [1, 1, 1, 4]
    assert summary.endswith("; others (4x)")


@pytest.mark.ci
def test_a_cause_of_another_kind_is_told_when_others_have_come_to_an_end(train, lines):
    class Cuts(TPUTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            step = self.state.global_step
            length = 7 - min(step, 5)
            loss = super().compute_loss(model, {k: v[:, :length] for k, v in inputs.items()}, *args, **kwargs)
            return loss * 3.5 if step == 7 else loss

    trainer = train(Cuts)
    assert trainer.watch.recompiles == 6
    told = [line for line in lines() if "recompilation of the training step" in line]
    assert len(told) == 6 and "step 8: " in told[-1] and "multiply by a 0 or 1" in told[-1], told


@pytest.mark.ci
def test_a_graph_that_changes_at_every_step_ends_no_run(train, lines):
    """Programs are listed for so many steps; after that, no cause is known."""

    class Repeats(TPUTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            for _ in range(self.state.global_step):
                loss = loss.tanh()
            return loss

    trainer = train(Repeats, max_steps=20)
    assert trainer.watch.recompiles == 19
    assert len([line for line in lines() if "recompilation of the training step" in line]) == 6


def test_another_run_sums_up_its_own(train):
    trainer = train(callbacks=[AtStep(rescale)])
    assert "Recompilations: 1 " in trainer.watch.describe()
    trainer.train()
    assert trainer.watch.describe() is None
