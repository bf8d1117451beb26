"""Copies of weights that are made during a run."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn


_NEVER_COPIES = ("hf_tpu_ext.", "transformers.")


class WeightCopies:
    """Lets user code copy weights as on an eager device, where steps give their buffers to compiled programs."""

    def __init__(self, trainer):
        self._trainer = trainer
        #: Entered during runs with code of the user's between steps, where programs are compiled.
        self.context = trainer.backend.programs.real_copies() if trainer.backend.traces_steps else None

    def real(self) -> AbstractContextManager:
        """Context of a run. Copies of device tensors that are made in it, outside of steps, have memory of their own."""
        trainer = self._trainer
        if self.context is None:
            return nullcontext()
        classes = [type(trainer), *map(type, trainer.callback_handler.callbacks)]
        functions = [trainer.compute_metrics, trainer.preprocess_logits_for_metrics, trainer.compute_loss_func]
        # Each call of an operator takes longer in it. Trackers and progress bars copy no weights.
        if functions == [None] * 3 and all(cls.__module__.startswith(_NEVER_COPIES) for cls in classes):
            return nullcontext()
        return self.context

    def not_made(self) -> AbstractContextManager:
        """Context of code that runs thousands of operators and keeps nothing."""
        return nullcontext() if self.context is None else self.context.suspended()

    def separate(self, model: nn.Module) -> None:
        """Give copies of a model's weights that were made before this run memory of their own."""
        backend = self._trainer.backend
        moments = [value for state in self._trainer._plain_optimizer.state.values() for value in state.values()]
        tensors = [*model.parameters(), *model.buffers(), *moments]
        backend.programs.separate_copies(
            [value for value in tensors if isinstance(value, Tensor) and value.device.type == backend.device.type]
        )
        self.context.seen = True
