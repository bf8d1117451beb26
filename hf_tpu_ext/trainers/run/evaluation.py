"""Evaluation and prediction on the compiled path."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from transformers import Seq2SeqTrainer
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, has_length
from transformers.utils import logging

from ...backends.compiled_function import CompiledFunction
from ...data.static_shapes import as_collated, count_rows
from ...layers.random_numbers import RandomNumbers
from ...step.metrics import DeviceSums
from ...step.running_code import is_known
from ...temporarily import temporarily
from ..checks.families import predicts_spans
from .predictions import find_columns, without_added, write_predictions
from .programs import SentBatch
from .text import TextGeneration
from .user_code import METHODS_OF_A_PREDICTION, METHODS_OF_A_STEP, computes_loss_by_itself, owner_of


logger = logging.get_logger(__name__)

#: What the watch calls the program of a batch whose loss is added up, and of one whose predictions are kept.
EVALUATION_STEP, PREDICTION_STEP = "evaluation step", "prediction step"
# Data to predict may have no labels.
_WITHOUT_LABELS = f"{PREDICTION_STEP} without labels"
# The key of the compiled function that computes both, which evaluations share.
_BATCHES = "the batches of evaluations"
#: Predictions and batches that are held back until they are read together take no more than this.
MOST_BYTES_HELD = 256 * 2**20


class Prediction(NamedTuple):
    """What upstream predicts of a batch, and how much of it counts."""

    #: Loss, logits and labels, on the device.
    result: Any
    #: How often the loss counts.
    times_counted: int
    #: Rows of the batch, and those that were computed.
    rows: int
    computed_rows: int
    #: As [`find_columns`] finds them.
    columns: dict[str, tuple[int, int]]


class CompiledEvaluation:
    """
    The part of [`TPUTrainerMixin`] that evaluates and predicts.

    On XLA the loss of an evaluation is summed on the device and read once, predictions are read for many batches at once, and
    a batch counts as upstream counts it, whatever was added to complete it. On CUDA and CPU every method is upstream's.
    """

    #: Predictions that were made and read ahead of upstream's loop, while it runs.
    _made_ahead: deque | None = None
    #: How often the loss counts of the batch that upstream's loop is at, until it has counted it; `None` afterwards.
    _loss_counts: int | None = None
    # Whether the loss of the last batch counts as that of a full one.
    _counts_last_in_full = False
    #: Writes predictions, where they are text.
    predicted_text: TextGeneration | None = None
    #: What cuts predictions down on the device, while they are made.
    _preprocess_on_device: Callable | None = None
    #: Numbers the batches of the evaluation under way, each of which draws other random numbers.
    _batch_numbers: Iterator[int] | None = None
    #: What its losses are added to.
    _loss_sums: DeviceSums | None = None
    #: What makes the results of the batch under way, and the numbers that it has on the device besides its own.
    _trace_batch: Callable | None = None
    evaluation_numbers: dict[str, torch.Tensor] | None = None

    # ---- A batch, as a program ----

    @contextmanager
    def _evaluation_under_way(self, sums: DeviceSums | None = None) -> Iterator[None]:
        """Context of an evaluation, whose losses are added to `sums`, or whose predictions are kept."""
        compiled = self.programs.of_run.get(_BATCHES)
        if compiled is not None and compiled.why_traced is not None:
            # What stood in its way may be gone.
            del self.programs.of_run[_BATCHES]
        with temporarily(self, _batch_numbers=count(1), _loss_sums=sums):
            yield

    def _compute_batch(self, kind: str, inputs: dict[str, Any], trace: Callable, **data: Any) -> Any:
        """
        Compute what `trace(inputs, **data)` makes of a batch. In `data` are numbers on the host, which are sent, and other values,
        which are part of the program.
        """
        end = partial(self.end_program, kind, f"{kind.replace(' step', '')} after step {self.state.global_step}")
        if self._batch_numbers is None:
            # A user may also call upstream's `prediction_step`, with the model as it is.
            result = trace(inputs, **self.backend.send(data))
            end()
            return result
        if (compiled := self.programs.of_run.get(_BATCHES)) is None:
            compiled = self.programs.of_run[_BATCHES] = self._compile_batches()
        self._trace_batch = trace
        with self.copies.unwatched():
            data["seed"] = self.seeds.beside(next(self._batch_numbers))
            data["of_evaluation"] = self.evaluation_data()
            return compiled(self.send_batch(inputs, data), end, kind=kind)

    def _run_batch(self, data: dict[str, dict[Any, Any]], kind: str) -> Any:
        """What is compiled."""
        numbers = dict(data["numbers"])
        seed, of_evaluation = numbers.pop("seed"), numbers.pop("of_evaluation")
        with RandomNumbers(seed), temporarily(self, evaluation_numbers=of_evaluation):
            return self._trace_batch(SentBatch(data["batch"]), **numbers)

    def _compile_batches(self) -> CompiledFunction:
        models = [self.model, *self.other_models()]
        compiled = self.programs.compile(
            self._run_batch,
            models,
            METHODS_OF_A_PREDICTION,
            state=lambda: [
                *({} if self._loss_sums is None else self._loss_sums.tensors).values(),
                *self.metric_tensors["eval"].values(),
            ],
            why_not=partial(self._why_batches_are_traced, models),
            settings=lambda: {
                "preprocess_logits_for_metrics": self._preprocess_on_device,
                "whether generate is called": self._calls_generate,
                "how the trainer computes": self.settings_of_programs(),
            },
        )
        self.programs.warn_if_traced(compiled)
        return compiled

    @property
    def _calls_generate(self) -> bool:
        """Whether upstream's `Seq2SeqTrainer` calls `generate` for each batch."""
        writes = isinstance(self, Seq2SeqTrainer) and vars(self.args).get("predict_with_generate", False)
        return writes and self._loss_sums is None

    def _why_batches_are_traced(self, models: list[nn.Module]) -> str | None:
        if self._calls_generate:
            return "generate writes text for each of them (predict_with_generate=True)"
        if self._preprocess_on_device is not None and self.programs.step_replay is not True:
            return "preprocess_logits_for_metrics is user code; step_replay=True if it does the same at every step"
        return self.programs.why_traced(models, METHODS_OF_A_PREDICTION, METHODS_OF_A_STEP)

    # ---- Predictions ----

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **kwargs):
        if not self.backend.metrics_on_device or prediction_loss_only:
            writes = self.predicted_text is not None and not prediction_loss_only
            with self.copies.unwatched(), self._loss_in_prediction(inputs):
                result = super().prediction_step(model, inputs, prediction_loss_only or writes, ignore_keys, **kwargs)
            if not writes:
                return result
            token_ids = write_predictions(self.predicted_text, inputs, self.args)
            return result[0], token_ids.to(self.args.device), inputs["labels"].to(self.args.device)
        if self._made_ahead is not None:
            times, result = self._made_ahead.popleft()
            self._loss_counts = None if result[0] is None else times
            return result
        return self._read_predictions([self._predict(model, inputs, ignore_keys, **kwargs)])[0][1]

    def _predict(self, model, inputs, ignore_keys, **kwargs) -> Prediction:
        trace = partial(self._trace_prediction, model, **kwargs)
        kind = _WITHOUT_LABELS if self.lacks_labels(inputs) else PREDICTION_STEP
        result = self._compute_batch(kind, inputs, trace, ignore_keys=ignore_keys)
        computed_rows, columns = count_rows(self.batch_under_way), find_columns(inputs, self.batch_under_way)
        if self.predicted_text is not None:
            token_ids = write_predictions(self.predicted_text, inputs, self.args)
            result, columns = (result[0], token_ids, as_collated(inputs)["labels"]), {}
        return Prediction(result, self._times_counted(inputs), find_batch_size(inputs), computed_rows, columns)

    def _trace_prediction(self, model, inputs, ignore_keys, **kwargs) -> tuple[Any, Any, Any]:
        with self.copies.unwatched(), self._loss_in_prediction(inputs):
            loss_only = self.predicted_text is not None
            loss, logits, labels = super().prediction_step(model, inputs, loss_only, ignore_keys, **kwargs)
        if self._preprocess_on_device is not None:
            logits = self._preprocess_on_device(logits, labels)
        return loss, logits, labels

    @contextmanager
    def _loss_in_prediction(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Context of a prediction of upstream's, which may compute its loss without calling `compute_loss`."""
        if not self.backend.static_shapes:
            yield
            return
        with self._static_loss(inputs) if computes_loss_by_itself(type(self)) else nullcontext():
            try:
                yield
            finally:
                self.forget_batch()

    def _read_predictions(self, predictions: list[Prediction]) -> list[tuple[int, tuple]]:
        # What upstream would concatenate on the device, a program per number of batches, is put together on the host.
        # There the rows and columns that completed a batch are cut off.
        results, read = self.backend.fetch([prediction.result for prediction in predictions]), []
        pad_beside_text = self._pad_labels_beside_text if self._calls_generate else None
        are_spans = predicts_spans(self.model)
        for result, of_batch in zip(results, predictions, strict=True):
            loss, logits, labels = (_first_rows(value, of_batch.rows, of_batch.computed_rows) for value in result)
            on_host = (
                loss,
                *without_added(logits, labels, of_batch.columns, self.label_names, pad_beside_text, are_spans),
            )
            read.append((of_batch.times_counted, on_host))
        return read

    def _pad_labels_beside_text(self, labels: torch.Tensor) -> torch.Tensor:
        """As upstream's `Seq2SeqTrainer` pads the labels of a batch where its predictions are text."""
        config, length = self.model.generation_config, labels.shape[1]
        least = config.max_length if length < config.max_length else 1 + (config.max_new_tokens or 0)
        return self._pad_tensors_to_max_len(labels, least) if length < least else labels

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test", **kwargs):
        self.take_up_changes()
        self.declare_length_of(test_dataset)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix, **kwargs)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        arguments = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self.backend.static_shapes:
            # It may be another dataset than before, or another batch size.
            self.expect_batches("eval")
        # Upstream's `Seq2SeqTrainer` gathers the rows that fill the last batch, too.
        self._counts_last_in_full = self.gather_function == self.accelerator.gather
        together = self.backend.processes.together("evaluation")
        same_weights = self.model_generate.from_same_weights() if self.backend.static_shapes else nullcontext()
        as_loops = self.layers.forward_loops([self.model, *self.other_models()], self.averaging.in_evaluation())
        with together, self.models_as_run(), as_loops, same_weights:
            if not self.backend.metrics_on_device:
                self._say_rows_repeated(dataloader)
                return super().evaluation_loop(dataloader, *arguments)
            if loss_only:
                return self._loss_loop(dataloader, metric_key_prefix)
            return self._predicting_loop(dataloader, arguments)

    def _say_rows_repeated(self, dataloader) -> None:
        """Say where the batches of several processes are filled with rows of the same data, which counts them twice."""
        most, processes = self.args.eval_batch_size, self.backend.processes.count
        if processes == 1 or "repeated" in self._said or not isinstance(dataloader, DataLoader):
            return
        dataset = dataloader.dataset
        if not has_length(dataset) or not len(dataset) % (most * processes):
            return
        self._said.add("repeated")
        fits = next((rows for rows in range(most, 0, -1) if len(dataset) % (rows * processes) == 0), None)
        fix = (
            f"Remove rows until {processes} divides them."
            if fits is None
            else f"per_device_eval_batch_size={fits} repeats none."
        )
        if self.is_world_process_zero():
            logger.warning(
                f"{len(dataset)} rows of evaluation do not fill batches of {most} on {processes} processes: as upstream, some are repeated, "
                f"and means of batches, such as rewards, count them twice. {fix}"
            )

    def _loss_loop(self, dataloader, metric_key_prefix: str) -> EvalLoopOutput:
        """Upstream's evaluation of the loss alone, which is read once."""
        model = self._wrap_model(self.model, training=False)
        model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            # As upstream: a schedule-free optimizer evaluates other weights than it trains.
            self.optimizer.eval()
        self.callback_handler.eval_dataloader = dataloader
        sums = DeviceSums(self.backend, floats=("loss", "rows"), integers=("losses",))
        num_samples = 0
        add_loss = partial(self._add_loss, model, sums)
        with self._evaluation_under_way(sums):
            for inputs in dataloader:
                num_samples += find_batch_size(inputs) or 0
                # It is sent as data, for the last batch to be the same program.
                weight = torch.tensor(float(self._times_counted(inputs)))
                self._compute_batch(EVALUATION_STEP, inputs, add_loss, weight=weight)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self.gather_function = self.accelerator.gather_for_metrics
        host_sums = self.backend.fetch({"loss": sums.tensors, "metrics": self.logged_metrics("eval")})
        self.take_metrics("eval", host_sums["metrics"])
        metrics = {}
        own = [host_sums["loss"][name].item() for name in ("losses", "rows", "loss")]
        losses, rows, loss = self.backend.processes.total(own)
        if losses:
            metrics[f"{metric_key_prefix}_loss"] = loss / rows if rows else math.nan
        # Upstream asks so, too: a loader of the user's need not have a dataset.
        dataset = getattr(dataloader, "dataset", None)
        if dataset is not None and has_length(dataset):
            num_samples = len(dataset)
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=num_samples)

    def _times_counted(self, inputs: Any) -> int:
        """
        How often the loss of a batch, as it came from the data, counts in the mean of an evaluation. Upstream repeats it for a full
        batch, of which accelerate leaves the rows that it knows the last one to have.
        """
        state, most = self.accelerator.gradient_state, self.args.eval_batch_size
        if self._counts_last_in_full or not state.end_of_dataloader:
            return most
        if state.remainder < 0 and self.accelerator.dispatch_batches is not False:
            # Streamed rows, which are not dispatched here, and whose last batch accelerate counts where it dispatches them.
            is_streamed = isinstance(state.active_dataloader.dataset, IterableDataset)
            return min(find_batch_size(inputs), most) if is_streamed else most
        # Rows of all processes, of which this one has the next after those of the processes before it.
        own = state.remainder - self.backend.processes.row_shard * most
        return min(max(own, 0), most) if state.remainder > 0 else most

    def _add_loss(self, model, sums: DeviceSums, inputs, weight: torch.Tensor) -> None:
        loss, _, _ = self.prediction_step(model, inputs, prediction_loss_only=True)
        if loss is not None:
            # Like upstream: by default, losses that are not finite are left out.
            counts = torch.isfinite(loss) if self.loss_log.filters else weight > 0
            sums.add(
                loss=torch.where(counts, loss.float() * weight, torch.zeros_like(weight)),
                rows=torch.where(counts, weight, torch.zeros_like(weight)),
                losses=torch.ones_like(weight),
            )

    def _predicting_loop(self, dataloader, arguments: tuple) -> EvalLoopOutput:
        """Upstream's loop, whose predictions are read for many batches at once."""
        # Logits are cut down on the device, in the program that makes them, and not once more on the host.
        preprocess, made_ahead, replaying = self.preprocess_logits_for_metrics, None, nullcontext()
        on_device, on_host = (preprocess, None) if self.predicted_text is None else (None, preprocess)
        if is_known(owner_of(type(self), "prediction_step").__module__):
            made_ahead = deque()
            _, _, ignore_keys, _ = arguments
            model = self._wrap_model(self.model, training=False)
            replaying = self._evaluation_under_way()

            def predict(inputs: Any) -> Prediction:
                # Upstream asks callbacks when predictions are read, which is many batches later.
                self.preemption.cut_if_told()
                return self._predict(model, inputs=inputs, ignore_keys=ignore_keys)

            # Metrics of each batch ask the dataloader whether it is the last one.
            several = self.backend.processes.own_rows
            most = 1 if self.args.batch_eval_metrics or several else self.args.eval_accumulation_steps
            dataloader = _PredictedAhead(dataloader, made_ahead, predict, self._read_predictions, most)
            # Upstream asks the dataloader which batch is the last one and has fewer rows. It may have been asked for by now.
            self.gather_function = self.accelerator.gather_for_metrics if several else self._as_counted
        try:
            with (
                replaying,
                temporarily(self, _preprocess_on_device=on_device, preprocess_logits_for_metrics=on_host),
                temporarily(self, _made_ahead=made_ahead),
                # It has another value for upstream's loop of training, which would read the loss of every micro-step.
                temporarily(self.args, logging_nan_inf_filter=self.loss_log.filters),
            ):
                output = super().evaluation_loop(dataloader, *arguments)
        finally:
            self.gather_function = self.accelerator.gather_for_metrics
        self.take_metrics("eval", self.backend.fetch(self.logged_metrics("eval")))
        return output

    def _as_counted(self, value: Any) -> Any:
        """The loss, which upstream repeats for a full batch, as often as it counts."""
        times, self._loss_counts = self._loss_counts, None
        # Upstream gathers the loss of a batch first. All else has the rows that the batch has.
        return value if times is None else value[:times]


class _PredictedAhead:
    """
    Dataloader that yields a batch when its prediction was read, together with those of other batches: `most` at once,
    by default as many as [`MOST_BYTES_HELD`] allows. What `predict` gives for a batch and `read` reads from the device
    is put in `results`.
    """

    def __init__(self, dataloader, results: deque, predict: Callable, read: Callable, most: int | None):
        self._dataloader, self._results = dataloader, results
        self._predict, self._read, self._most = predict, read, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        batches: list[Any] = []
        predictions: list[Prediction] = []
        held_bytes = 0
        for batch in self._dataloader:
            batches.append(batch)
            predictions.append(self._predict(inputs=batch))
            leaves = tree_leaves((batch, predictions[-1].result))
            held_bytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            if len(batches) == self._most or (self._most is None and held_bytes >= MOST_BYTES_HELD):
                self._results.extend(self._read(predictions))
                yield from map(as_collated, batches)
                batches, predictions, held_bytes = [], [], 0
        if batches:
            self._results.extend(self._read(predictions))
            yield from map(as_collated, batches)


def _first_rows(value: Any, rows: int, computed_rows: int) -> Any:
    """
    The first of `computed_rows` rows of (nested) tensors, or of so many sequences for each. What is of bfloat16, as all that
    autocast computes, is in float32, as upstream has it. Float16 is the model's or the labels' own.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(_first_rows(item, rows, computed_rows) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim and computed_rows > rows and value.shape[0] % computed_rows == 0:
        value = value[: value.shape[0] // computed_rows * rows]
    return value.float() if value.dtype == torch.bfloat16 else value
