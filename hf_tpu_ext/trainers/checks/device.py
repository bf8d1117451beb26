"""The device of arguments that upstream has made for another."""

import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import TrainingArguments

from ...backends.base import Backend


def bind_device(args: TrainingArguments, backend: Backend) -> None:
    """
    Point arguments, and the accelerate state that goes with them, to the backend's device.

    Upstream fixes the device when the arguments are made, which may have been before the backend was chosen, and has
    no name for an XLA device other than its own XLA branches, which are switched off.
    """
    if backend.unknown_upstream:
        AcceleratorState._reset_state(reset_partial_state=True)
        # Before, for accelerate to find those that have met. It exchanges on the host what the trainers do not.
        several = backend.processes.own_rows
        args.distributed_state = PartialState(cpu=True)
        args.distributed_state.device = backend.device
        if several:
            # Accelerate names the device by the process's number on its machine, and each of these has but the first.
            vars(args.distributed_state)["wait_for_everyone"] = torch.distributed.barrier
        else:
            # Of hosts one logs and saves. There are not several to divide batches between: each has the batch of all chips.
            args.distributed_state.process_index = args.distributed_state.local_process_index = backend.processes.index
        args._n_gpu = 0
        # `TrainingArguments.device` is a cached property of this name.
        vars(args)["_setup_devices"] = backend.device
    elif args.device.type != backend.device.type:
        args.use_cpu = backend.device.type == "cpu"
        del vars(args)["_setup_devices"]
        assert args.device.type == backend.device.type
