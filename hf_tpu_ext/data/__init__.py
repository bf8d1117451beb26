"""Static-shape batches: padding to declared lengths, complete last batches, length buckets and packed rows."""

from .buckets import percentile_buckets
from .packing import PackedCollator
from .padding_report import TokenWaste
from .static_shapes import StaticShapeCollator, pad_rows


__all__ = ["PackedCollator", "StaticShapeCollator", "TokenWaste", "pad_rows", "percentile_buckets"]
