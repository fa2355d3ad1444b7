"""Measurements of the kernels and of whole forwards, and the parity of every backend with its reference."""
