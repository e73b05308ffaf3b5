"""The start of a program: check everything that can be checked, then bring up the strategy."""

from __future__ import annotations

import json
import os
import pathlib
import random

from tfpar import cluster, inputs, models, precision, strategies
from tfpar.config import ConfigError, ExperimentConfig, unknown_name
from tfpar.exchange import Exchange
from tfpar.quiet import quiet_startup
from tfpar.training import checkpoints, optimizers, schedules
from tfpar.training.checkpoints import check_same_run

import keras
import numpy as np
import tensorflow as tf


def start(config: ExperimentConfig) -> strategies.Layout:
    """Validates a configuration, seeds everything, and creates the strategy.

    Call it first thing in a program: devices and collectives can only be set up before TensorFlow's first op.

    Args:
      config: The experiment.

    Returns:
      The running layout. A worker or parameter server of `parameter_server` serves here until it is ended.

    Raises:
      ConfigError: Anything in the configuration or the cluster description that cannot work, before a server is
        started or a file is touched.
    """
    quiet_startup(config.monitor.verbose)
    plan = strategies.plan(config.strategy, cluster.detect())
    check(config, plan)
    if config.train.deterministic:
        tf.config.experimental.enable_op_determinism()
    seed_everything(config.train.seed)
    layout = strategies.build(plan)
    precision.set_policy(config.precision)
    if plan.is_chief:
        print(layout.plan.describe(), flush=True)
    return layout


def seed_everything(seed: int) -> None:
    """Seeds initialisers and whatever else draws random numbers, the same in every process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    tf.random.set_seed(seed)
    keras.utils.set_random_seed(seed % 2**32)


def check(config: ExperimentConfig, plan: strategies.Plan) -> None:
    """Checks names, sizes and the workdir against each other.

    Raises:
      ConfigError: The first thing that cannot work.
    """
    if config.model.model not in models.names():
        raise unknown_name("--model", config.model.model, models.names())
    if config.optimizer.optimizer not in optimizers.names():
        raise unknown_name("--optimizer", config.optimizer.optimizer, optimizers.names())
    schedules.check(config.schedule)
    Exchange(config.exchange.exchange).check_supported(plan.name)
    inputs.check_kind(config.input)
    inputs.check_augmentation(config.input.augment)
    if plan.name != "tpu":  # a TPU's replicas are known once it is initialised
        inputs.check_divides(config.input, plan.replicas, config.train.accumulate_steps)
    check_workdir(config)


def check_workdir(config: ExperimentConfig) -> None:
    """Refuses a workdir that cannot be written or that holds a run of another configuration."""
    workdir = config.checkpoint.workdir
    if not workdir:
        return
    path = pathlib.Path(workdir)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--workdir={workdir} is a file. Name a directory; it is created if it does not exist.")
    existing = next(parent for parent in [path, *path.absolute().parents] if parent.exists())
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"--workdir={workdir}: no permission to write in {existing}.")
    saved = checkpoints.saved_config(workdir)
    if saved is not None:
        check_same_run(saved, json.loads(json.dumps(config.as_flat_dict())), workdir)
