"""Tensor parallelism: replicas of several devices, which divide the weights among themselves (`--mesh`)."""

from tfpar.training.tensor_parallel.placing import DividedPlacing

__all__ = ["DividedPlacing"]
