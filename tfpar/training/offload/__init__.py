"""Optimizer state in the memory of the host (`--offload`)."""
