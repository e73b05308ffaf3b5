"""Tensor parallelism: replicas of several devices, among which the weights are divided (`--mesh`)."""

from tfpar.training.tensor_parallel.model import axis_of, check_divided, devices_of, divide, on_host
from tfpar.training.tensor_parallel.step import DividedStep

__all__ = ["DividedStep", "axis_of", "check_divided", "devices_of", "divide", "on_host"]
