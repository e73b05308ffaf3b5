"""The start of a program: `validate` refuses what cannot work, `initialize` starts the strategy."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

from tfpar import inputs, precision
from tfpar.config import ConfigError, ExperimentConfig, StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.mesh import AUTO, parse_mesh
from tfpar.parallel.topology import Topology
from tfpar.process.exit_codes import install_exit_code_hook, install_sigterm_handler
from tfpar.process.heap import keep_freed_memory, return_freed_tensors, share_heaps
from tfpar.process.startup import quiet_startup
from tfpar.training.duration import check_length
from tfpar.training.objective import Objective
from tfpar.training.optimizer_spec import OptimizerSpec
from tfpar.training.placing.check import check_on_topology
from tfpar.training.planning import auto
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
    model: keras.Model | Callable[[], keras.Model] | None = None,
    optimizer: OptimizerSpec | None = None,
    layout: Mapping[str, Any] | None = None,
    objective: Callable[[keras.Model], Objective] | None = None,
) -> strategies.Runtime:
    """Validates an experiment, seeds all random generators, and starts the strategy.

    Call it before anything runs a TensorFlow operation: devices and collectives can only be set up until then. Building
    sources of `tfpar.inputs` runs none.

    Args:
      config: The experiment.
      train: As for `validate`.
      validation: As for `validate`.
      complete: Whether `config` is complete, so that it can already be compared with a run saved in its workdir. By
        default it is if data are given; otherwise `Trainer` compares, because it may get other options, or objects in
        place of names.
      model: A function that builds the model, for `--mesh=auto` and `--device_memory`; by default, given data, the
        model that the configuration names.
      optimizer: The optimizer; by default the one that the configuration names.
      layout: How layers are divided over a model axis, see `Trainer`.
      objective: What is minimised in place of a loss, see `Trainer`.

    Returns:
      The topology and the running strategy. A worker or parameter server of `parameter_server` never returns: it serves
      here until it is ended.

    Raises:
      ConfigError: Anything in the configuration, the cluster description or the data that cannot work, before a server
        is started or a file is touched.
    """
    quiet_startup(config.monitor.tensorflow_log)
    install_exit_code_hook()
    given = auto.Subject(build=model, optimizer=optimizer, layout=layout, own_objective=objective is not None)
    subject = auto.Subject.named(config, train) if model is None else given
    options: dict[str, Any] = {}
    if auto.is_auto(config):
        _validate_before_plan(config, given_data=train is not None)
        options = auto.planned(config, subject)
        config = with_plan(config, options)
    topology = _validate(config, train, validation, complete=train is not None if complete is None else complete)
    if config.strategy.device_memory and not options:
        auto.check_memory(config, subject)
    if config.train.deterministic:
        tf.config.experimental.enable_op_determinism()
    seed_everything(config.train.seed)
    _set_up_heaps(config, topology)
    runtime = strategies.build(topology)
    precision.set_policy(config.precision)
    if topology.is_chief and config.monitor.verbose:
        _log.info(runtime.topology.describe())
        if notice := uneven_notice(config, runtime.topology.replicas):
            _log.info(notice)
    return dataclasses.replace(runtime, options=options)


def _set_up_heaps(config: ExperimentConfig, topology: Topology) -> None:
    """Tunes the C library's heaps before TensorFlow starts its threads and makes a tensor."""
    on_cpu = topology.device_type == "CPU"
    replicas_on_cpu = topology.local_replicas > 1 and on_cpu
    divided = topology.mesh.devices_of_replica > 1 or config.train.shard != "none"
    if divided or replicas_on_cpu:
        share_heaps()
    if divided and on_cpu and topology.workers > 1:  # within one process, dividing saves no memory
        return_freed_tensors()
    if replicas_on_cpu:
        keep_freed_memory()


def with_plan(config: ExperimentConfig, options: Mapping[str, Any]) -> ExperimentConfig:
    """The configuration with the choices of `--mesh=auto`, if that option is set.

    Args:
      config: The experiment.
      options: `Runtime.options`.
    """
    if not options or not auto.is_auto(config):
        return config
    return ExperimentConfig.from_flat_dict({**config.as_flat_dict(), **options})


def check_runtime(config: ExperimentConfig, topology: Topology) -> None:
    """Refuses options that contradict a running strategy, which would be ignored, or that do not work with it.

    An option that has its default is not compared: the running strategy decides.

    Args:
      config: The experiment, after `with_plan`.
      topology: The topology of the running strategy.

    Raises:
      ConfigError: The first such option, with both values.
    """
    for name, running in _decided_options(topology).items():
        asked = getattr(config.strategy, name)
        if asked in (running, getattr(StrategyConfig(), name)):
            continue
        if name == "mesh" and running and _is_mesh(asked, topology):
            continue
        reason = ", and a plan is made before the strategy starts" if asked == AUTO else ""
        raise ConfigError(
            f"--{name}={asked} does not agree with the given runtime, which runs with "
            f"{f'--{name}={running}' if running else f'no --{name}'}{reason}. Give the same options to "
            f"tfpar.initialize and to the Trainer, or leave --{name} or the runtime out."
        )
    check_on_topology(config, topology)


def _decided_options(topology: Topology) -> dict[str, Any]:
    """The options that a running strategy has decided, by name, without those that it does not use."""
    decided: dict[str, Any] = {"strategy": topology.name}
    if topology.name == "tpu":
        return decided | {"mesh": "", "tpu": topology.tpu}
    decided |= {"devices": topology.local_devices, "mesh": topology.mesh.text if topology.synchronous else ""}
    if topology.cluster is not None and topology.name in ("multi_worker", "parameter_server"):
        decided |= {"peer_timeout": topology.peer_timeout, "start_timeout": topology.start_timeout}
        if topology.synchronous and topology.workers > 1:
            decided["transport"] = topology.transport
    return decided


def _is_mesh(text: str, topology: Topology) -> bool:
    """Whether a value of `--mesh` describes the mesh of a topology; there are several values for the same mesh."""
    try:
        return parse_mesh(text, workers=topology.workers, devices=topology.local_devices) == topology.mesh
    except ConfigError:
        return False


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


def _validate_before_plan(config: ExperimentConfig, *, given_data: bool) -> None:
    """Refuses what no plan can mend: making one takes half a minute."""
    validate_config(config)
    validate_workdir(config, complete=False)
    if given_data and config.train.steps:  # without data, `fit` may have another number of steps
        check_length(config, config.train.steps)


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's, TensorFlow's and Keras' random generators, the same in every process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    tf.random.set_seed(seed)
    keras.utils.set_random_seed(seed % 2**32)
