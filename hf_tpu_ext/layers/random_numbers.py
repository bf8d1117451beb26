"""Random numbers of a program: each follows from a seed, which is data, the draw and the place of the element, by a hash."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from hashlib import blake2b
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..backends.program_parts import ManualSharding
from ..temporarily import temporarily


# Odd, so that different places have different numbers: 2**32 over the golden ratio, and a multiplier of MurmurHash3.
BY_ROW, BY_COLUMN = (number - 2**32 for number in (0x9E3779B9, 0x85EBCA6B))


def scramble(bits: Tensor) -> Tensor:
    """A hash of int32 numbers."""
    # lowbias32 of https://nullprogram.com/blog/2018/07/31/ on the numbers that there are: PyTorch's are signed.
    for places, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        bits = (bits ^ _shift(bits, places)) * factor
    return bits ^ _shift(bits, 16)


def _shift(bits: Tensor, by: int) -> Tensor:
    # By a tensor: torch_xla divides where the number of places is a Python number, and chips have no division of integers.
    places = torch.full((), by, dtype=bits.dtype, device=bits.device)
    return torch.bitwise_right_shift(bits & 0x7FFFFFFF, places)


def gumbel(shape: tuple[int, int], seed: Tensor) -> Tensor:
    """
    Numbers of the Gumbel distribution in float32: `(rows, columns)`, all finite. They follow from a seed, int32 of shape `()`,
    and the place, and are the same however rows are split over chips.
    """
    # From 1: the hash of 0 is 0, and a seed may be 0.
    rows, columns = (torch.arange(1, size + 1, dtype=torch.int32, device=seed.device) for size in shape)
    bits = scramble(scramble(seed + rows[:, None] * BY_ROW) + columns * BY_COLUMN) & 0x7FFFFFFF
    # `-log(-log(1 - x))` of a uniform x, since the large numbers, which choose unlikely tokens, then come from an x near 0, where
    # float32 is fine. Near 1 its steps are 2**-24: of as many columns as a vocabulary has, one would often be infinite.
    return -(-(-_portion(bits)).log1p()).log()


def _portion(bits: Tensor) -> Tensor:
    """Numbers of 31 bits as float32 between 0 and 1, and neither of them."""
    return ((bits.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)


# Odd, as those for rows and columns: another multiplier of MurmurHash3.
_BY_DRAW = 0xC2B2AE35 - 2**32
# How many binary digits of a number from 0 to 1 a dtype holds, where these are fewer than those of float32.
_BITS = {torch.bfloat16: 8, torch.float16: 11}
_LARGEST = 2**31


class RandomSeeds:
    """
    The seeds of a run, on the host: one for each program that may draw random numbers.

    Those of training follow from the run's `seed` and from `count`, the micro-steps that were taken, which a
    checkpoint keeps. Others, as of an evaluation, leave it as it is, so that training does not depend on how often
    it is evaluated.
    """

    def __init__(self, seed: int):
        self._seed = seed
        #: Micro-steps for which a seed was taken.
        self.count = 0

    def next(self) -> Tensor:
        """The seed of the next micro-step: int32 of shape `()`."""
        self.count += 1
        return self.beside(-1)

    def beside(self, number: int) -> Tensor:
        """The seed of another program between two micro-steps, by its number there: int32 of shape `()`."""
        digest = blake2b(f"{self._seed} {self.count} {number}".encode(), digest_size=4).digest()
        return torch.tensor(int.from_bytes(digest, signed=True), dtype=torch.int32)


class RandomNumbers(AbstractContextManager):
    """
    Context in which PyTorch's random operators on the device draw numbers that follow from a seed.

    A device's own generator gives other numbers where rows are split over chips, and its state would have to be a part of what
    a program is given and leaves. These are the same on one chip and on several, in a program that is traced and in one that runs
    again, and where layers are computed again in the backward pass.

    Meanwhile PyTorch's functions by the names of [`DRAWS`] are others: a [`~torch.overrides.TorchFunctionMode`] would do the same,
    but its line would stand for that of every operator where the cause of a recompilation is looked for. Functions that are not
    among them, or were imported by their own name, and those with a `generator`, draw what they draw without this context.

    Args:
        seed (`torch.Tensor` of shape `()`, int32): The seed, on the device.
        chip (`torch.Tensor` of shape `()`, int32, *optional*):
            The number of the part of the rows that is computed with, where each part is computed by itself, by its own chip or in
            its own turn of a loop. By default there is one.
        num_draws (`int`, *optional*, defaults to 0): How many draws with this seed there were before.
    """

    _contexts: ClassVar[list["RandomNumbers"]] = []

    def __init__(self, seed: Tensor, chip: Tensor | None = None, num_draws: int = 0):
        self.seed, self.chip = seed, chip
        #: Draws so far.
        self.num_draws = num_draws

    @classmethod
    def current(cls, device: torch.device) -> "RandomNumbers":
        """The innermost context. Outside of any, one whose seed the device's own generator draws."""
        if cls._contexts:
            return cls._contexts[-1]
        return cls(torch.randint(-_LARGEST, _LARGEST - 1, (), dtype=torch.int32, device=device))

    def __enter__(self) -> "RandomNumbers":
        if not self._contexts:
            for owner, name, draw in DRAWS:
                _PYTORCHS[owner, name] = vars(owner).get(name)
                setattr(owner, name, _replacement(getattr(owner, name), draw))
        self._contexts.append(self)
        return self

    def __exit__(self, *error) -> None:
        self._contexts.pop()
        if self._contexts:
            return
        for (owner, name), function in _PYTORCHS.items():
            if function is None:
                # It is that of a base, in C.
                delattr(owner, name)
            else:
                setattr(owner, name, function)

    # ---- Seeds ----

    def next_seed(self) -> Tensor:
        """Another seed at each call, int32 of shape `()`."""
        self.num_draws += 1
        # The product's low 32 bits, as int32.
        return scramble(self.seed + ((self.num_draws * _BY_DRAW + _LARGEST) % 2**32 - _LARGEST))

    def seeds(self, count: int) -> Tensor:
        """Seeds for so many iterations of a loop, each with the number of the chip, or 0: `(count, 2)`, int32."""
        iterations = torch.arange(1, count + 1, dtype=torch.int32, device=self.seed.device)
        chip = torch.zeros((), dtype=torch.int32, device=self.seed.device) if self.chip is None else self.chip
        return torch.stack([scramble(self.next_seed() + iterations * BY_ROW), chip.reshape(1).expand(count)], 1)

    @contextmanager
    def in_region(self, sharding: ManualSharding, num_chips: int) -> Iterator[None]:
        """Within this context, which is one of manual sharding, each chip draws for its own rows."""
        chips = torch.arange(num_chips, dtype=torch.int32, device=self.seed.device)
        seed, chip = sharding.full_to_shard(self.seed), sharding.full_to_shard(chips, by_rows=True).reshape(())
        with temporarily(self, seed=seed, chip=chip):
            yield

    # ---- Numbers ----

    def drop(self, tensor: Tensor, p: float) -> Tensor:
        """Dropout of a tensor, of shape `(..., width)`: the elements that are left are multiplied by `1 / (1 - p)`."""
        if p == 1:
            return tensor * 0
        rows, columns = self._places(tensor.shape, tensor.device)
        seed = self.next_seed()
        # Multiply-shift hashing (Dietzfelbinger et al., 1997): of a product of odd numbers, here drawn for rows and columns, the
        # high bits are as good as drawn. A whole hash of each element would take the compiler for TPU much longer.
        bits = (scramble(seed + rows * BY_ROW) | 1) * (scramble(seed + columns * BY_COLUMN) | 1)
        # As upstream's noise: 0, or the factor that keeps the mean.
        factor = torch.full((), 1 / (1 - p), dtype=tensor.dtype, device=tensor.device)
        # By a tensor: with a Python number torch_xla compares in 64 bits, of which chips have none.
        least = torch.full((), min(round(p * 2**32) - 2**31, 2**31 - 1), dtype=torch.int32, device=tensor.device)
        return tensor * torch.where(bits >= least, factor, torch.zeros_like(factor))

    def bits(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Numbers of 31 bits, int32, each by a whole hash."""
        # A scalar has one row and one column.
        rows, columns = self._places(shape or (1,), device)
        words = scramble(scramble(self.next_seed() + rows * BY_ROW) + (columns + 1) * BY_COLUMN) & 0x7FFFFFFF
        return words.expand(shape or (1,)).reshape(tuple(shape))

    def uniform(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers from 0, inclusively, to 1, in float32, of no more bits than a `dtype` holds: none of them is rounded to 1."""
        unused = 31 - _BITS.get(dtype, 24)
        return (self.bits(shape, device) & (0x7FFFFFFF >> unused << unused)).float() * 2.0**-31

    def _places(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Places of the rows of a tensor among those of all chips, of as many dimensions, and of its columns."""
        size = 1
        place = torch.zeros((), dtype=torch.int32, device=device)
        for dim in range(len(shape) - 2, -1, -1):
            along = torch.arange(shape[dim], dtype=torch.int32, device=device)
            place = place + along.reshape(-1, *[1] * (len(shape) - 1 - dim)) * size
            size *= shape[dim]
        if self.chip is not None:
            place = place + self.chip * size
        return place, torch.arange(shape[-1], dtype=torch.int32, device=device)


# ---- PyTorch's operators ----


def _on_device(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type != "cpu"


def _dropout(
    numbers: RandomNumbers, func: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
):
    if not (_on_device(input) and training and 0 < p <= 1):
        return func(input, p, training, **({"inplace": True} if inplace else {}))
    result = numbers.drop(input, p)
    return input.copy_(result) if inplace else result


def _attention(
    numbers: RandomNumbers,
    func: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
):
    settings = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not (_on_device(query) and dropout_p):
        return func(query, key, value, attn_mask, dropout_p, **settings)
    # As in the documentation of `scaled_dot_product_attention`.
    if enable_gqa:
        key, value = (states.repeat_interleave(query.shape[-3] // states.shape[-3], -3) for states in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return numbers.drop(scores.softmax(-1), dropout_p) @ value


def _torch_dropout(numbers: RandomNumbers, func: Callable, input: Tensor, p: float, train: bool):
    return _dropout(numbers, functional.dropout, input, p, train)


def _dropout_(numbers: RandomNumbers, func: Callable, input: Tensor, p: float, train: bool):
    return _dropout(numbers, functional.dropout, input, p, train, inplace=True)


def _fill(make: Callable[..., Tensor]) -> Callable:
    """An operator that fills a tensor in place."""

    def fill(numbers: RandomNumbers, func: Callable, tensor: Tensor, *args: Any, **kwargs: Any):
        if not _on_device(tensor):
            return func(tensor, *args, **kwargs)
        # Autograd goes no further back than to here, as with PyTorch's.
        with torch.no_grad():
            return tensor.copy_(make(numbers, tensor, *args, **kwargs).to(tensor.dtype))

    return fill


def _uniform(numbers, like: Tensor, a: float = 0.0, b: float = 1.0, *, to: float | None = None) -> Tensor:
    return numbers.uniform(like.shape, like.device, like.dtype) * ((b if to is None else to) - a) + a


def _normal(numbers, like: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    # Box and Muller, 1958, with a logarithm of numbers that are never 0.
    radius = (-2 * _portion(numbers.bits(like.shape, like.device)).log()).sqrt()
    return radius * (2 * torch.pi * numbers.uniform(like.shape, like.device)).cos() * std + mean


def _exponential(numbers, like: Tensor, lambd: float = 1.0) -> Tensor:
    # None of them is 0.
    return -(-_portion(numbers.bits(like.shape, like.device))).log1p() / lambd


def _bernoulli(numbers, like: Tensor, p: Any = 0.5) -> Tensor:
    return numbers.uniform(like.shape, like.device) < p


def _new(make_empty: Callable, fill: Callable) -> Callable:
    """An operator that makes a tensor, as `make_empty` does with the same arguments."""

    def make(numbers: RandomNumbers, func: Callable, *args: Any, **kwargs: Any):
        needs_gradient = kwargs.pop("requires_grad", False)
        empty = make_empty(*args, **kwargs)
        if not _on_device(empty):
            return func(*args, **kwargs, requires_grad=needs_gradient)
        return fill(numbers, func, empty).requires_grad_(needs_gradient)

    return make


def _integers(numbers: RandomNumbers, like: Tensor, low: int, high: int) -> Tensor:
    # The high bits of a product, so that all are as likely: a remainder would favour the smaller ones. It holds in 63 bits.
    places = torch.full((), 31, device=like.device)
    integers = torch.bitwise_right_shift(numbers.bits(like.shape, like.device).long() * (high - low), places) + low
    return integers.to(like.dtype)


def _take_bounds(bounds: Sequence[int], options: dict[str, Any]) -> Sequence[int]:
    """The bounds of integers, of which the lower one may be left out. Those that are among the options are taken out of these."""
    bounds = [*bounds, *(options.pop(name) for name in ("low", "high") if name in options)]
    return bounds if len(bounds) == 2 else (0, *bounds)


def _randint(numbers: RandomNumbers, func: Callable, *args: Any, **kwargs: Any):
    options = dict(kwargs)
    *bounds, size = *args, *([options.pop("size")] if "size" in options else [])
    bounds = _take_bounds(bounds, options)
    empty = torch.empty(size, **{"dtype": torch.int64, **options})
    return _integers(numbers, empty, *bounds) if _on_device(empty) else func(*args, **kwargs)


def _randint_like(numbers: RandomNumbers, func: Callable, input: Tensor, *args: Any, **kwargs: Any):
    options = dict(kwargs)
    bounds = _take_bounds(args, options)
    empty = torch.empty_like(input, **options)
    return _integers(numbers, empty, *bounds) if _on_device(empty) else func(input, *args, **kwargs)


def _bernoulli_of(numbers: RandomNumbers, func: Callable, input: Tensor, *args: Any, **kwargs: Any):
    if not _on_device(input):
        return func(input, *args, **kwargs)
    p = args[0] if args else kwargs.get("p", input)
    return _bernoulli(numbers, input, p).to(input.dtype)


_fill_uniform, _fill_normal = _fill(_uniform), _fill(_normal)

#: What draws in the place of PyTorch's functions.
DRAWS: list[tuple[Any, str, Callable]] = [
    (functional, "dropout", _dropout),
    (functional, "scaled_dot_product_attention", _attention),
    (torch, "dropout", _torch_dropout),
    (torch, "dropout_", _dropout_),
    (Tensor, "uniform_", _fill_uniform),
    (Tensor, "normal_", _fill_normal),
    (Tensor, "exponential_", _fill(_exponential)),
    (Tensor, "bernoulli_", _fill(_bernoulli)),
    (Tensor, "bernoulli", _bernoulli_of),
    (torch, "bernoulli", _bernoulli_of),
    (torch, "rand", _new(torch.empty, _fill_uniform)),
    (torch, "rand_like", _new(torch.empty_like, _fill_uniform)),
    (torch, "randn", _new(torch.empty, _fill_normal)),
    (torch, "randn_like", _new(torch.empty_like, _fill_normal)),
    (torch, "randint", _randint),
    (torch, "randint_like", _randint_like),
]
# PyTorch's, while others are in their place.
_PYTORCHS: dict[tuple[Any, str], Callable | None] = {}


def _replacement(function: Callable, draw: Callable) -> Callable:
    @wraps(function)
    def call(*args, **kwargs):
        # Whoever has taken this one by its name within a context has it for ever.
        if not RandomNumbers._contexts or kwargs.get("generator") is not None:
            return function(*args, **kwargs)
        kwargs.pop("generator", None)
        return draw(RandomNumbers._contexts[-1], function, *args, **kwargs)

    return call


def draws_random_numbers(model: nn.Module) -> str | None:
    """A setting (`name=value`) by which a model draws random numbers in training, or its dropout modules."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p:
            return "dropout (as lora_dropout)"
        if "config" in vars(module):
            for key, value in module.config.to_dict().items():
                # Heads for classification are not part of a language model.
                if "drop" in key and not key.startswith("classifier") and isinstance(value, float) and value:
                    return f"{key}={value}"
    return None
