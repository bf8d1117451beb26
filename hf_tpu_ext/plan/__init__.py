"""Plans a run before a TPU is rented: its programs, compiled by the compiler for TPU on any machine."""
