"""The seam between the trainers and an accelerator: what every accelerator answers, a file or a folder for each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..hardware.topologies import Chip
from ..temporarily import temporarily
from .compile_cache import CacheUse, cache_root
from .compiled_function import Programs
from .device_processes import launched_processes
from .insight import Counters, Insight
from .processes import Processes
from .program_parts import Kernels, Loops, ManualSharding


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Call a function on each tensor of a nested structure, in its order."""
    if isinstance(data, torch.Tensor):
        return function(data)
    # Asking for an abstract class takes longest, and a step does so for each of its numbers.
    if isinstance(data, (str, int, float, type(None))):
        return data
    if isinstance(data, (dict, Mapping)):
        return type(data)([(key, map_tensors(function, value)) for key, value in data.items()])
    if isinstance(data, (list, tuple)):
        return type(data)([map_tensors(function, value) for value in data])
    return data


def tensors_in(data: Any) -> list[torch.Tensor]:
    """The tensors of a nested structure, in its order."""
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, data)
    return tensors


def replace_tensors(tensors: Iterable[torch.Tensor], data: Any) -> Any:
    """A nested structure with other tensors, in its order, in the place of its own."""
    others = iter(tensors)
    return map_tensors(lambda _: next(others), data)


class Backend(ABC):
    """
    One accelerator, and how a training step is run on it.

    The defaults are what upstream does on an eager device, so a backend states only where it differs.
    """

    name: str

    # ---- How steps are run here. Each question has a name of its own: an accelerator may answer yes to any of them ----

    #: Whether kernels that are written for GPUs run here (FlashAttention, Liger).
    runs_gpu_kernels: bool = False
    #: Whether every new shape is compiled anew, so that batches, masks and experts keep to a few declared shapes.
    static_shapes: bool = False
    #: Whether operators are recorded, and a step is one program that runs when it ends.
    traces_steps: bool = False
    #: Whether each operator is a program of its own, which is compiled while a step runs.
    compiles_operators: bool = False
    #: Whether a function of tensors can be traced and compiled whole, and so a step.
    compiles_functions: bool = False
    #: Whether losses and metrics are summed on the device and read at logs only, in one transfer.
    metrics_on_device: bool = False
    #: Whether one process drives all chips, and tensors are annotated with how they are split over them.
    shards_by_annotation: bool = False
    #: Whether transformers and accelerate do not know the device: arguments are adapted, and the model placed, for them.
    unknown_upstream: bool = False
    #: Whether this process holds parts of the weights, which all put together to compute with them and to save them.
    splits_weights: bool = False

    # ---- What is not asked of every accelerator, in protocols of its own ----

    #: What the runtime tells about compiles and reads.
    insight: Insight = Insight()
    #: Loops inside a program.
    loops: Loops = Loops()
    #: Kernels inside a program.
    kernels: Kernels = Kernels()
    #: Functions that are compiled once and run many times. Only where `traces_steps` or `compiles_functions`.
    programs: Programs

    def __init__(self, reason: str):
        #: Why it was chosen, for the line that is printed at start.
        self.reason = reason
        #: Regions that each chip runs on its own shard.
        self.manual_sharding = ManualSharding()
        self._for_first = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backend":
        # There is one in a process. What a run puts on the modules of a model may hold it.
        return self

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that the model and the batches are placed on. Asking for it may start the runtime."""

    @property
    @abstractmethod
    def device_name(self) -> str:
        """The device's name for people, e.g. `"TPU v5 lite"`."""

    @property
    def num_chips(self) -> int:
        """Chips that this process drives, together with those of other hosts."""
        return 1

    @property
    def processes(self) -> Processes:
        """
        The processes that train together. Asking for them may have them meet. Where upstream knows the device, it averages their
        gradients.
        """
        return launched_processes()

    @property
    def chip(self) -> Chip | None:
        """What is known of the kind of chip, or `None` where nothing is."""
        return None

    @property
    def memory_per_chip(self) -> int | None:
        """Bytes that a program can use on one chip, or `None` where that is not known."""
        return None if self.chip is None else self.chip.memory_bytes

    def peak_memory(self) -> int | None:
        """The most bytes in use at once so far, on the device or else of the process; `None` if that is not known."""
        return None

    def use_chips(self, num_chips: int | None, setting: str) -> None:  # noqa: B027
        """
        Say how many chips to drive (all by default), before the runtime starts. Messages name `setting`, which says
        so. Raises `ValueError` if this machine does not have them, or the runtime already drives another number.
        """

    @property
    def chips_of_host(self) -> int:
        """Chips of this machine that take a process each: 1 where one process drives all."""
        return 1

    def prepare_processes(self, count: int, setting: str) -> None:  # noqa: B027
        """
        Set up the environment of `count` processes that are to be started, one for each chip. Messages name `setting`, which
        says how many. Raises `ValueError` where there cannot be as many.
        """

    def prepare_host(self) -> list[str]:
        """Set up the machine, before the runtime starts. Returns lines on what was done or a person should do."""
        return []

    def use_compile_cache(self, setting: str) -> list[str]:
        """
        Keep compiled programs on disk, for other processes. Before anything is compiled. `setting` is
        `compile_cache_dir` of [`~hf_tpu_ext.trainers.ExtensionArguments`]. Returns a line for each thing that a person
        should know.
        """
        directory, is_explicit = cache_root(setting)
        if directory is None or not is_explicit:
            return []
        return [f"compile_cache_dir={directory} has no effect on {self.name}: nothing is compiled"]

    def cache_use(self) -> CacheUse | None:
        """What this process has had of its compile cache so far, or `None` where there is none."""
        return None

    # ---- Mesh: without effect on one device ----

    def use_mesh(self, mesh: dict[str, int]) -> None:  # noqa: B027
        """Arrange the chips: the size of each axis, outermost first. Their product is `num_chips`."""

    def shard(self, tensor: torch.Tensor, spec: tuple) -> None:  # noqa: B027
        """
        Split a device tensor over the mesh, in place. `spec` has for each dimension the name of a mesh axis, a tuple
        of them, or `None`. All `None` puts the whole tensor on every chip.
        """

    def place_as(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Move a CPU tensor to the device, split as another one is that is there."""
        return tensor.to(like.device)

    def constrain_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Keep an activation, and its gradient, split by its first dimension, the rows of the batch, over all chips. It
        is left alone if they do not divide by the chips.
        """
        return tensor

    def gather(self, weight: torch.Tensor) -> torch.Tensor:
        """
        Make a weight, or its gradient, whole on every chip, where the mesh splits weights: by one collective, at this
        point of the program. Autograd does not follow.
        """
        return weight

    # ---- Steps ----

    def end_step(self) -> None:  # noqa: B027
        """Close the program recorded so far and start it, without waiting for it."""

    def flush(self) -> None:  # noqa: B027
        """Start what was recorded so far, if there is anything."""

    def wait(self) -> None:  # noqa: B027
        """Close the program recorded so far, and return when the device has finished all of them."""

    def send(self, data: Any) -> Any:
        """Move CPU tensors, or a nested structure of them, to the device, as data: never folded into a program."""
        return map_tensors(lambda tensor: tensor.to(self.device), data)

    def send_rows(self, data: Any, num_rows: int) -> Any:
        """
        Move a batch of `num_rows` rows to the device; each chip gets its own rows only. Tensors with another first
        dimension go to every chip.
        """
        return self.send(data)

    def fetch(self, data: Any, on_finished: Callable[[], None] | None = None) -> Any:
        """
        Move a device tensor, or a nested structure of them, to the host, all in one transfer. Tensors that share
        memory still do afterwards. `on_finished` is called between the wait for the device and the transfer, where
        these are two things. Tensors that are split over hosts are gathered one by one, by all hosts at once.
        """
        return map_tensors(lambda tensor: tensor.detach().cpu(), data)

    def stream(self, data: Any) -> Any:
        """
        As [`~Backend.fetch`], for what is given to `torch.save` or [`save_safetensors`]: a tensor of the device may be a
        [`StreamedTensor`], which is read when it is written. Nothing may change the tensors until then.
        """
        return self.fetch(data)

    def fetching_for_first(self) -> AbstractContextManager[None]:
        """
        Within this context, the first of several hosts fetches what it is to write. Others take part, and get tensors
        without data (meta), but for single numbers.
        """
        return temporarily(self, _for_first=True)

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, in place; tied weights stay tied, and parameters keep their hooks and attributes."""
        # To XLA and TPU, `.to` gives every name a tensor of its own, so weights that were one tensor before are made one again.
        # Going by identity rather than by `tie_weights()` also covers models that are not from transformers.
        before = dict(model.named_parameters(remove_duplicate=False))
        model.to(self.device)
        placed: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            first = placed.setdefault(before[name], parameter)
            if first is not parameter:
                module_name, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module_name), attribute, first)
        for original, parameter in placed.items():
            if parameter is not original:
                # Attributes that the user has set: a mask of gradients, a mark for parameter groups.
                vars(parameter).update(vars(original))
                parameter._backward_hooks = original._backward_hooks
                parameter._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
        return model

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager:
        """Context in which the forward pass computes in `dtype`, or that of its inputs; weights stay as they are."""
        # The cache would hand a weight that was cast without a graph, as KTO's KL term does before the policy runs, to a pass
        # with one, and the weight would have no gradient. A compiler casts a weight once however often it is asked to.
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype, cache_enabled=False)

    def separate(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same tensors, past which the compiler does not look: what uses them waits until all are there."""
        return tensors

    def replace_checkpoint(self, recompute: Callable) -> AbstractContextManager[None]:
        """
        Context in which a model's own calls of `checkpoint(function, *args)` are `recompute(function, *args)`, where PyTorch's does not
        fit the device.
        """
        return nullcontext()

    def compile_module(self, module: nn.Module) -> Callable[[], None]:
        """Have calls of a module compiled, in place. Returns what undoes that. Only where `compiles_functions`."""
        raise NotImplementedError

    def as_written(self) -> AbstractContextManager:
        """Context in which modules whose calls are compiled are called as they are written."""
        return nullcontext()

    def compiles(self) -> int:
        """Programs compiled so far. Cheap enough to be asked at every step."""
        return 0

    @property
    def compile_mark(self) -> Callable[[], object]:
        """What returns something else once a program was compiled. Cheap enough to be called many times a step."""
        return int

    def counters(self) -> Counters:
        """What the runtime has compiled, run and transferred so far."""
        return Counters()

    def rng_state(self) -> int | None:
        """State of the device's random number generator, where it is one integer of its own."""
        return None

    def set_rng_state(self, state: int) -> None:  # noqa: B027
        """Restore what [`~Backend.rng_state`] returned."""
