"""Few bits: layers that compute as they will after rounding."""
