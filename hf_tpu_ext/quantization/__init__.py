"""Few bits: weights that stay packed, and layers that compute as they will after rounding."""
