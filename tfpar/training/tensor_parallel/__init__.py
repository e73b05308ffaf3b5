"""Tensor parallelism: replicas of several devices, among which the weights are divided (`--mesh`)."""

from tfpar.training.tensor_parallel.placing import DividedPlacing

__all__ = ["DividedPlacing"]
