"""Sharded optimizer state: every worker keeps and updates its own share (`--shard=optimizer`)."""

from tfpar.training.sharding.optimizer import OwnShare, is_share, take_exact_weights, whole_arrays
from tfpar.training.sharding.step import ShardedStep

__all__ = ["OwnShare", "ShardedStep", "is_share", "take_exact_weights", "whole_arrays"]
