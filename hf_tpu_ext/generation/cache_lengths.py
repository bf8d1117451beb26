"""The lengths of a cache that grows while tokens are generated."""

from collections.abc import Sequence

from torch import Tensor, nn


#: Lengths before the last are multiples of it, the width of a vector of a TPU.
MULTIPLE = 128
#: The fewest tokens that a length is for.
LEAST = 32


def choose_cache_lengths(
    cache: Sequence[Tensor], model: nn.Module, prompt: int, new_tokens: int, chips: int, room: int
) -> list[int]:
    """
    Choose the lengths of the cache, one after the other, while tokens are generated.

    Attention reads the whole cache for every token. Where that is more than the weights, which a token reads as well, a cache of
    about half the length comes first, if it has room for the prompt and memory has room for both. Each length is a loop of its
    own, which takes its time to compile.

    Args:
        cache (`Sequence[torch.Tensor]` of shapes `(..., positions, width)`):
            Keys and values of all layers and rows, of any number of positions.
        model ([`~torch.nn.Module`]):
            The model. Weights of a floating dtype are read in the dtype of the cache, others (packed ones) as they are.
        prompt (`int`): Positions of the prompt.
        new_tokens (`int`): Tokens after it, at most.
        chips (`int`): Chips that each have a part of the rows, and all weights.
        room (`int`): Bytes that a shorter cache may take on a chip beside the next one.

    Returns:
        `list[int]`: Positions, ascending. The last has all tokens.
    """
    of_position = sum(tensor.nbytes // tensor.shape[-2] for tensor in cache) // chips
    width = cache[0].dtype.itemsize
    weights = sum(
        weight.numel() * (width if weight.is_floating_point() else weight.dtype.itemsize)
        for weight in model.parameters()
    )
    lengths = [prompt + new_tokens]
    while of_position * lengths[0] > weights:
        half = round(lengths[0] / (2 * MULTIPLE)) * MULTIPLE
        if not prompt + LEAST <= half <= lengths[0] - LEAST or of_position * half > room:
            break
        lengths.insert(0, half)
    return lengths
