"""The start of a program: check everything that can be checked, then bring up the strategy."""

from __future__ import annotations

import errno
import json
import logging
import pathlib
import random
import tempfile

from tfpar import cluster, inputs, models, precision
from tfpar.checkpoint import checkpointer, run_state, workdir_lock
from tfpar.checkpoint.checkpointer import check_same_run
from tfpar.config import CUSTOM, ConfigError, ExperimentConfig, unknown_name
from tfpar.exchange import Exchange
from tfpar.optim import optimizers, schedules
from tfpar.parallel import strategies
from tfpar.parallel.topology import Topology, choose_topology
from tfpar.process.exit_codes import install_exit_code_hook, install_sigterm_handler
from tfpar.process.startup import quiet_startup
from tfpar.training.validate import check_run, train_input, uneven_notice

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)


def start(
    config: ExperimentConfig, train: inputs.Source | None = None, validation: inputs.Source | None = None
) -> strategies.Runtime:
    """Validates a configuration, seeds everything, and creates the strategy.

    Call it before anything runs a TensorFlow operation: devices and collectives can only be set up until then. Sources
    of `tfpar.inputs` run none when they are built.

    Args:
      config: The experiment.
      train: The examples that the configuration's model is to be trained on. With them, model, batches, schedule and
        augmentation are checked too, which otherwise waits until they are built.
      validation: The examples to evaluate on.

    Returns:
      The running layout. A worker or parameter server of `parameter_server` serves here until it is ended.

    Raises:
      ConfigError: Anything in the configuration or the cluster description that cannot work, before a server is
        started or a file is touched.
    """
    quiet_startup(config.monitor.verbose)
    install_exit_code_hook()
    topology = check(config)
    if train is not None:
        check_run(config, topology, train, validation)
    if config.train.deterministic:
        tf.config.experimental.enable_op_determinism()
    seed_everything(config.train.seed)
    runtime = strategies.build(topology)
    precision.set_policy(config.precision)
    if topology.is_chief:
        _log.info(runtime.topology.describe())
        if notice := uneven_notice(config, runtime.topology.replicas):
            _log.info(notice)
    return runtime


def seed_everything(seed: int) -> None:
    """Seeds initialisers and whatever else draws random numbers, the same in every process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    tf.random.set_seed(seed)
    keras.utils.set_random_seed(seed % 2**32)


def check(config: ExperimentConfig) -> Topology:
    """Checks names, sizes, the cluster and the workdir against each other. Starts nothing and writes nothing.

    `start` does the same; on its own it finds what is wrong before a large data set is looked at. From here on SIGTERM
    is a preemption, exit code 85, unless the program handles it.

    Returns:
      The layout that the strategy would have.

    Raises:
      ConfigError: The first thing that cannot work.
    """
    install_sigterm_handler()
    topology = choose_topology(config.strategy, cluster.detect())
    if config.model.model not in (*models.names(), CUSTOM):
        raise unknown_name("--model", config.model.model, models.names())
    if config.optimizer.optimizer != CUSTOM:
        optimizers.check_arguments(config.optimizer)
    schedules.check(config.schedule)
    Exchange(config.exchange.exchange).check_supported(topology.name)
    if config.input.dataset != CUSTOM:
        inputs.check_kind(config.input)
    inputs.check_augmentation(config.input.augment)
    if topology.name != "tpu":  # a TPU's replicas are known once it is initialised
        inputs.check_divides(train_input(config), topology.replicas, config.train.accumulate_steps)
    if config.input.data_service:
        inputs.check_service(config.input.data_service)
    check_workdir(config)
    return topology


def check_workdir(config: ExperimentConfig) -> None:
    """Refuses a workdir that cannot be written, is in use, or holds a run of another configuration."""
    workdir = config.checkpoint.workdir
    if not workdir:
        if config.checkpoint.warm_start:
            run_state.check_warm_start(config.checkpoint.warm_start)
        return
    path = pathlib.Path(workdir)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--workdir={workdir} is a file. Name a directory; it is created if it does not exist.")
    existing = next(parent for parent in [path, *path.absolute().parents] if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):  # permissions alone do not tell: root, read-only file systems, /proc
            pass
    except OSError as error:
        # A run that is to go on, restarted by a scheduler perhaps, can do without room on its disk.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not checkpointer.has_any(workdir):
            raise ConfigError(
                f"--workdir={workdir}: {existing} cannot be written to ({error.strerror}). Name a directory that can."
            ) from error
    workdir_lock.check_free(workdir)
    saved = checkpointer.saved_config(workdir)
    if saved is None and config.checkpoint.warm_start:
        run_state.check_warm_start(config.checkpoint.warm_start)
    if saved is not None:
        check_same_run(saved, json.loads(json.dumps(config.as_flat_dict())), workdir)
