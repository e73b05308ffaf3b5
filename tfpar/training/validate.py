"""Whether configuration, layout and data make a run: found out before a strategy starts and before a file is written.

Nothing here runs a TensorFlow operation.
"""

from __future__ import annotations

import dataclasses
import os

from tfpar import inputs, models, precision
from tfpar.checkpoint import checkpointer
from tfpar.checkpoint.model_files import task_spec
from tfpar.config import ConfigError, ExperimentConfig, InputConfig
from tfpar.optim import optimizers, schedules
from tfpar.parallel.topology import Topology
from tfpar.process.exit_codes import LEFT_OUT
from tfpar.training.duration import total_steps

# Why XLA cannot compile such a model on several replicas.
SYNCHRONISED = "the model synchronises batch statistics between replicas, for which TensorFlow has no XLA kernel"


def check_run(
    config: ExperimentConfig, topology: Topology, train: inputs.Source, validation: inputs.Source | None
) -> None:
    """Checks what a configuration says of model, batches, augmentation and length against the data.

    Args:
      config: The experiment; its model is the one that is to be trained.
      topology: The layout.
      train: Training examples.
      validation: Examples to evaluate on, or None.

    Raises:
      ConfigError: The first thing that cannot work.
    """
    optimizers.check_arguments(config.optimizer)
    check_sources(config, topology, train, validation)
    models.check(config.model.model, task_spec(train), **config.model.arguments())
    _check_compiles(config, topology)
    inputs.check_augmentation(config.input.augment, train.info.input_spec.shape)
    if topology.name == "tpu":  # its replicas, and with them the batches, are known once it is initialised
        return
    total = total_steps(config.train, None, None, _updates_per_epoch(config, topology, train))
    peak = optimizers.scaled_learning_rate(config.optimizer, config.input.global_batch_size)
    schedules.build(config.schedule, peak=peak, total_steps=total)


def check_sources(
    config: ExperimentConfig, topology: Topology, train: inputs.Source, validation: inputs.Source | None
) -> None:
    """Checks that there are examples to train and to evaluate on, and that this layout can read them.

    Raises:
      ConfigError: An empty source, or one that the layout cannot read; names the split and the way out.
    """
    _check_not_empty(config, "train", train)
    if validation is not None:
        _check_not_empty(config, "validation", validation)
    elif config.schedule.schedule == "plateau":
        raise ConfigError(
            "--schedule=plateau waits for evaluations, and there are no validation examples. Hold some out "
            "(--validation_fraction=0.1), or choose another schedule."
        )
    if not topology.synchronous:
        check_asynchronous(config, train)
    if topology.name == "tpu":
        return
    _updates_per_epoch(config, topology, train)
    if validation is not None:
        inputs.Pipeline(validation, config.input, replicas=topology.replicas, workers=topology.workers, training=False)


def check_asynchronous(config: ExperimentConfig, train: inputs.Source) -> None:
    """Refuses what asynchronous training does not support.

    Raises:
      ConfigError: Examples that are read through Python, loss scaling, determinism, or what needs updates in order.
    """
    if not train.portable:
        raise ConfigError(
            f"--dataset={train.info.name}: with --strategy=parameter_server the workers read examples by number, "
            "and this source reads files through Python on the chief. Use --cache=memory, or a synchronous strategy."
        )
    if precision.uses_loss_scale(config.precision.precision):
        raise ConfigError(
            f"--precision={config.precision.precision}: loss scaling needs replicas that agree on overflow, and "
            "parameter_server has none. Use --precision=mixed_bfloat16."
        )
    if config.train.deterministic:
        raise ConfigError(
            "--deterministic: asynchronous updates arrive in no fixed order. Leave it out, or use a synchronous "
            "strategy."
        )
    if config.optimizer.ema or config.schedule.schedule == "plateau":
        raise ConfigError(
            "--ema and --schedule=plateau need updates in order; parameter_server has no order. Leave them out."
        )


def train_input(config: ExperimentConfig) -> InputConfig:
    """The input options that training goes by: a run that goes on may do so on any number of replicas.

    At a fresh start a batch that does not divide is more likely an oversight. A run that has a checkpoint, or that the
    launcher continues with fewer workers, is better off with shares of different sizes, weighted by example, than
    refused.
    """
    workdir = config.checkpoint.workdir
    goes_on = os.environ.get(LEFT_OUT, "0") != "0" or (workdir != "" and checkpointer.has_any(workdir))
    return dataclasses.replace(config.input, uneven_batches=config.input.uneven_batches or goes_on)


def uneven_notice(config: ExperimentConfig, replicas: int) -> str:
    """One line where a run goes on with batches that do not divide by its replicas; else empty."""
    batch, parts = config.input.global_batch_size, replicas * config.train.accumulate_steps
    if batch % parts == 0 or config.input.uneven_batches:
        return ""
    micro = f" x {config.train.accumulate_steps} micro-batches" if config.train.accumulate_steps > 1 else ""
    return (
        f"--global_batch_size={batch} does not divide by {replicas} replicas{micro}: this run goes on with up to "
        f"{-(-batch // parts)} examples for each, weighted by example, so that updates stay exact"
    )


def _updates_per_epoch(config: ExperimentConfig, topology: Topology, train: inputs.Source) -> int:
    pipeline = inputs.Pipeline(
        train,
        train_input(config),
        accumulate_steps=config.train.accumulate_steps,
        replicas=topology.replicas,
        workers=topology.workers,
        seed=config.train.seed,
    )
    # Asynchronous updates are one worker's each.
    return pipeline.updates_per_epoch * (1 if topology.synchronous else topology.workers)


def _check_compiles(config: ExperimentConfig, topology: Topology) -> None:
    """Refuses what `Trainer.jit_compile` would, where the model's options tell."""
    options = models.options(config.model.model) | config.model.arguments()
    if config.train.jit_compile == "true" and topology.replicas > 1 and options.get("normalization") == "sync_batch":
        raise ConfigError(
            f"--jit_compile=true: {SYNCHRONISED}. Use --jit_compile=auto, or another --model_args=normalization."
        )


def _check_not_empty(config: ExperimentConfig, role: str, source: inputs.Source) -> None:
    info = source.info
    if info.num_examples:
        return
    by_flag = info.name == config.input.dataset
    what = f"--dataset={info.name}: the {role} split is empty" if by_flag else f"fit({role}=...): {info.name} is empty"
    ways = []
    if info.task == inputs.LANGUAGE_MODEL:
        length = info.label_spec.shape[0]
        ways.append(f"give it more bytes than one window of --sequence_length={length} takes, or a shorter window")
    else:
        ways.append("give it examples")
    if role == "validation" and by_flag:
        if info.name.startswith("tfrecord:"):  # files of one split only: what is held out of none is nothing
            ways.append("let the pattern match files named validation* too, or none named train*")
        else:
            ways.append(f"hold out more than --validation_fraction={config.input.validation_fraction:g}")
        ways.append("train without evaluation: --validation_fraction=0")
    elif role == "validation":
        ways.append("leave validation out")
    raise ConfigError(f"{what}. Ways out: {'; '.join(ways)}.")
