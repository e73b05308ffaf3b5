"""Optimizer state in host memory (`--offload`)."""
