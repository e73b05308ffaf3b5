"""Sharded state: every worker keeps and updates its own share (`--shard`)."""

from tfpar.training.sharding.averages import SharedAverages
from tfpar.training.sharding.choose import sharded_step
from tfpar.training.sharding.optimizer import OwnShare
from tfpar.training.sharding.restoring import restore_shares
from tfpar.training.sharding.saved import is_share

__all__ = ["OwnShare", "SharedAverages", "is_share", "restore_shares", "sharded_step"]
