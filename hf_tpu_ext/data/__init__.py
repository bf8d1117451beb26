"""Static-shape batches: padding to declared lengths, complete last batches, length buckets and packed rows."""

from .buckets import batch_lengths, percentile_buckets, round_up_length, validate_buckets
from .packing import PackedCollator
from .padding_report import TokenWaste
from .static_shapes import (
    PAD_VALUES,
    CollatedBatch,
    ShapeGuard,
    StaticShapeCollator,
    WrappedCollator,
    as_collated,
    count_all,
    count_not_padding,
    count_rows,
    length_of,
    pad_columns,
    pad_rows,
    pad_value_of,
)


__all__ = [
    "PAD_VALUES",
    "CollatedBatch",
    "PackedCollator",
    "ShapeGuard",
    "StaticShapeCollator",
    "TokenWaste",
    "WrappedCollator",
    "as_collated",
    "batch_lengths",
    "count_all",
    "count_not_padding",
    "count_rows",
    "length_of",
    "pad_columns",
    "pad_rows",
    "pad_value_of",
    "percentile_buckets",
    "round_up_length",
    "validate_buckets",
]
