"""Global batches that are not divisible by replicas x micro-batches, and when a resumed run may have them."""

from __future__ import annotations

import dataclasses
import os

from tfpar.checkpoint import checkpointer
from tfpar.config import ExperimentConfig, InputConfig
from tfpar.process.exit_codes import LEFT_OUT


def train_input(config: ExperimentConfig) -> InputConfig:
    """The input options for training, with uneven batches allowed where a run is resumed.

    At a fresh start such a batch is more likely an oversight, and is refused unless --uneven_batches is given. A run
    that has a checkpoint, or that the launcher continues with fewer workers, is better off with shares of different
    sizes, weighted by example, than refused.
    """
    workdir = config.checkpoint.workdir
    resumed = os.environ.get(LEFT_OUT, "0") != "0" or (workdir != "" and checkpointer.has_any(workdir))
    return dataclasses.replace(config.input, uneven_batches=config.input.uneven_batches or resumed)


def eval_input(config: ExperimentConfig) -> InputConfig:
    """The input options for evaluation and prediction. A separate batch size need not be divisible by the number of
    replicas, because an evaluation sums over examples, whatever share of a batch a replica has."""
    if not config.train.eval_batch_size:
        return config.input
    return dataclasses.replace(config.input, global_batch_size=config.eval_batch_size, uneven_batches=True)


def uneven_notice(config: ExperimentConfig, replicas: int) -> str:
    """One line for the log if a resumed run has batches that its replicas cannot divide; else empty."""
    batch, parts = config.input.global_batch_size, replicas * config.train.accumulate_steps
    if batch % parts == 0 or config.input.uneven_batches:
        return ""
    micro = f" x {config.train.accumulate_steps} micro-batches" if config.train.accumulate_steps > 1 else ""
    return (
        f"--global_batch_size={batch} is not divisible by {replicas} replicas{micro}: this run continues with up to "
        f"{-(-batch // parts)} examples for each, weighted by example, so that every step stays exact"
    )
