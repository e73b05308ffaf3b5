"""The start of a program: `validate` refuses what cannot work, `initialize` starts the strategy."""

from __future__ import annotations

import logging
import random

from tfpar import inputs, precision
from tfpar.config import ExperimentConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import Topology
from tfpar.process.exit_codes import install_exit_code_hook, install_sigterm_handler
from tfpar.process.startup import quiet_startup
from tfpar.training.uneven_batches import uneven_notice
from tfpar.training.validate import validate_config, validate_data, validate_model, validate_workdir

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)


def validate(
    config: ExperimentConfig, train: inputs.AnySource | None = None, validation: inputs.AnySource | None = None
) -> Topology:
    """Refuses an experiment that cannot work: the first four stages of `tfpar.training.validate`.

    Starts nothing and writes nothing. `initialize` does the same; called on its own, without data, it finds mistakes
    before a large data set is read. From here on SIGTERM is a preemption, exit code 85, unless the program handles it.

    Args:
      config: The experiment.
      train: The examples that the configuration's model is to be trained on. With them model, batches, schedule and
        augmentation are checked too; otherwise that waits until they are built.
      validation: The examples to evaluate on.

    Returns:
      The topology that the strategy would have.

    Raises:
      ConfigError: The first thing that cannot work.
    """
    return _validate(config, train, validation, complete=True)


def initialize(
    config: ExperimentConfig,
    train: inputs.AnySource | None = None,
    validation: inputs.AnySource | None = None,
    *,
    complete: bool | None = None,
) -> strategies.Runtime:
    """Validates an experiment, seeds all random generators, and starts the strategy.

    Call it before anything runs a TensorFlow operation: devices and collectives can only be set up until then. Building
    sources of `tfpar.inputs` runs none.

    Args:
      config: The experiment.
      train: As for `validate`.
      validation: As for `validate`.
      complete: Whether `config` holds everything that the run will have, so that a run saved in its workdir can be
        compared with it already. By default it does if data are given; otherwise `Trainer` compares, which may be given
        other options, or objects in place of names.

    Returns:
      The topology and the running strategy. A worker or parameter server of `parameter_server` never returns: it serves
      here until it is ended.

    Raises:
      ConfigError: Anything in the configuration, the cluster description or the data that cannot work, before a server
        is started or a file is touched.
    """
    quiet_startup(config.monitor.tensorflow_log)
    install_exit_code_hook()
    topology = _validate(config, train, validation, complete=train is not None if complete is None else complete)
    if config.train.deterministic:
        tf.config.experimental.enable_op_determinism()
    seed_everything(config.train.seed)
    runtime = strategies.build(topology)
    precision.set_policy(config.precision)
    if topology.is_chief and config.monitor.verbose:
        _log.info(runtime.topology.describe())
        if notice := uneven_notice(config, runtime.topology.replicas):
            _log.info(notice)
    return runtime


def _validate(
    config: ExperimentConfig, train: inputs.AnySource | None, validation: inputs.AnySource | None, *, complete: bool
) -> Topology:
    install_sigterm_handler()
    topology = validate_config(config)
    if train is not None:
        validate_data(config, topology, train, validation)
        validate_model(config, topology, train, validation)
    validate_workdir(config, complete=complete)
    return topology


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's, TensorFlow's and Keras' random generators, the same in every process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    tf.random.set_seed(seed)
    keras.utils.set_random_seed(seed % 2**32)
