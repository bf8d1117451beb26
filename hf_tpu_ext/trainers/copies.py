"""Copies of weights that are made during a run."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from ..backends.program import RealCopies


_NEVER_COPIES = ("hf_tpu_ext.", "transformers.")


class RealCopiesMixin:
    """
    The part of [`TPUTrainerMixin`] that lets callbacks and subclasses copy weights as on an eager device, where steps give the
    buffers of the weights to compiled programs.
    """

    #: Entered during runs with code of the user's between steps, where programs are compiled.
    _copies: RealCopies

    def copies_are_real(self) -> AbstractContextManager:
        """Context of a run. Copies of device tensors that are made in it, outside of steps, have memory of their own."""
        if not self.backend.traces_steps:
            return nullcontext()
        classes = [type(self), *map(type, self.callback_handler.callbacks)]
        functions = [self.compute_metrics, self.preprocess_logits_for_metrics, self.compute_loss_func]
        # Each call of an operator takes longer in it. Trackers and progress bars copy no weights.
        if functions == [None] * 3 and all(cls.__module__.startswith(_NEVER_COPIES) for cls in classes):
            return nullcontext()
        return self._copies

    def separate_copies(self, model: nn.Module) -> None:
        """
        Give the copies of weights that were made before this run memory of their own.

        Args:
            model ([`~torch.nn.Module`]):
                Model on the device, in the form that it is trained in.
        """
        moments = [value for state in self._plain_optimizer.state.values() for value in state.values()]
        tensors = [*model.parameters(), *model.buffers(), *moments]
        self.backend.programs.separate_copies(
            [value for value in tensors if isinstance(value, Tensor) and value.device.type == self.backend.device.type]
        )
        self._copies.seen = True

    def _copies_as_ever(self) -> AbstractContextManager:
        """Context of code that runs thousands of operators and keeps nothing."""
        return self._copies.suspended() if self.backend.traces_steps else nullcontext()

    # ---- Upstream's hooks ----

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        with self._copies_as_ever():
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def prediction_step(self, *args, **kwargs):
        with self._copies_as_ever():
            return super().prediction_step(*args, **kwargs)
