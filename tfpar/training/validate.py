"""The stages of validation, in order; each refuses runs that cannot work.

| stage | when it runs | what it compares |
|---|---|---|
| `validate_config` | `tfpar.validate`, `tfpar.initialize` | options with each other and with the cluster |
| `validate_data` | the same, given data; `Trainer.fit` | data with options and topology |
| `validate_model` | the same, given data; `Trainer.fit` | the model with the data |
| `validate_workdir` | `tfpar.validate`, `tfpar.initialize` | the workdir with the configuration |
| `validate_saved_run` | with the stage before, or in `Trainer` | the saved run with the configuration |
| `validate_same_goal` | `Trainer`, before it makes variables | losses, metrics and a given model of the workers |
| `validate_workers_agree` | `Trainer.fit`, before the first step | the workers with each other |

All but the last two run no TensorFlow operation, start nothing and write no file: they come before the strategy.
"""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tfpar import cluster, inputs, models, precision
from tfpar.checkpoint import checkpointer, run_state, workdir_lock
from tfpar.checkpoint.model_files import task_spec
from tfpar.cluster import failure
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import CUSTOM, PER_HOST_OPTIONS, ConfigError, ExperimentConfig, unknown_name
from tfpar.exchange import Exchange
from tfpar.inputs.checks import check_same_shapes
from tfpar.optim import optimizers, schedules
from tfpar.parallel.mesh import AUTO
from tfpar.parallel.planner.machine import parse_size
from tfpar.parallel.split import shape_of
from tfpar.parallel.topology import Topology, choose_topology, without_auto
from tfpar.process.writable import unwritable_message, write_error
from tfpar.training.duration import check_length, total_steps
from tfpar.training.local_steps.check import check_resumed_rounds
from tfpar.training.model.recompute import check_pattern
from tfpar.training.model.xla import SYNCHRONISED
from tfpar.training.placing.check import check_on_topology
from tfpar.training.uneven_batches import train_input

import keras
import numpy as np
import tensorflow as tf

_GOAL = ("loss", "loss_weights", "metrics", "weighted_metrics")


def validate_config(config: ExperimentConfig) -> Topology:
    """Stage 1: refuses options that do not exist, contradict each other, or do not suit the cluster.

    For example: an unknown model, optimizer, schedule, exchange, data set or augmentation, or a wrong argument of one;
    a strategy that this machine or cluster cannot run; a global batch that is not divisible by the number of replicas;
    a tf.data service that does not answer. Runs before any data are read.

    Args:
      config: The experiment.

    Returns:
      The topology that the strategy will have.

    Raises:
      ConfigError: The first thing that cannot work.
    """
    automatic = config.strategy.mesh == AUTO  # workers and devices are known, their mesh is not
    topology = choose_topology(without_auto(config.strategy), cluster.detect())
    if config.model.model not in (*models.names(), CUSTOM):
        raise unknown_name("--model", config.model.model, models.names())
    if config.optimizer.optimizer != CUSTOM:
        optimizers.check_arguments(config.optimizer)
    schedules.check_schedule(config.schedule)
    check_pattern(config.train.recompute)
    parse_size(config.strategy.device_memory)
    Exchange(config.exchange.exchange).check_supported(topology.name)
    if not automatic:
        check_on_topology(config, topology)
    if config.input.dataset != CUSTOM:
        inputs.check_kind(config.input)
    inputs.check_augmentation(config.input.augment)
    if topology.name != "tpu" and not automatic:  # the number of a TPU's replicas is known once it is initialised
        inputs.check_divides(train_input(config), topology.replicas, config.train.accumulate_steps)
    if config.input.data_service:
        inputs.check_service(config.input.data_service)
    return topology


def validate_data(
    config: ExperimentConfig, topology: Topology, train: inputs.AnySource, validation: inputs.AnySource | None
) -> None:
    """Stage 2: refuses data on which this run cannot train or be evaluated.

    Such data are an empty source; fewer examples than a batch, with `remainder=drop`; fewer files than workers; a
    schedule that needs validation examples where there are none; examples that parameter servers or a tf.data service
    cannot read; validation examples of another shape than the training examples. Runs before the strategy starts, and
    again in `Trainer.fit`.

    Args:
      config: The experiment.
      topology: From `validate_config`, or the running one.
      train: Training examples.
      validation: Examples to evaluate on, or None.

    Raises:
      ConfigError: The first thing that cannot work; names the split and what to do.
    """
    _check_not_empty(config, "train", train)
    if validation is not None:
        _check_not_empty(config, "validation", validation)
        check_same_shapes(train.info, validation.info)
    schedules.check_evaluated(config.schedule, validation is not None)
    if not topology.synchronous:
        _check_parameter_server(config, train)
    if topology.name == "tpu":
        return
    _steps_per_epoch(config, topology, train)
    if validation is not None:
        layout: dict[str, Any] = {"replicas": topology.replicas, "workers": topology.data_workers}
        inputs.build_pipeline(validation, config.input, **layout, training=False)


def validate_model(
    config: ExperimentConfig,
    topology: Topology,
    train: inputs.AnySource,
    validation: inputs.AnySource | None = None,
    *,
    model: keras.Model | None = None,
    integer_labels: bool = False,
) -> None:
    """Stage 3: refuses a model that cannot be trained on these data.

    Before the strategy starts there is no model yet: this refuses a --model for another task, wrong --model_args,
    an --augment that does not suit the shape of the examples, --jit_compile=true for a model that XLA cannot compile,
    and a schedule that does not fit into the length of the run. `Trainer.fit` passes the built model: this refuses data
    with more classes than the model has outputs.

    Args:
      config: The experiment. Unless `model` is given, the model it names is the one to train.
      topology: From `validate_config`, or the running one.
      train: Training examples.
      validation: Examples to evaluate on, or None.
      model: The built model.
      integer_labels: For a built model: whether its loss reads labels as indices of the model's outputs.

    Raises:
      ConfigError: The first thing that cannot work.
    """
    if model is not None:
        if integer_labels:
            _check_labels_within_outputs(model, train, validation)
        return
    optimizers.check_arguments(config.optimizer)
    models.check_model(config.model.model, task_spec(train), **config.model.arguments())
    _check_compiles(config, topology)
    inputs.check_augmentation(config.input.augment, train.info.input_spec)
    if topology.name == "tpu":  # the number of its replicas, and so of the steps, is known once it is initialised
        return
    check_length(config, total_steps(config.train, None, None, _steps_per_epoch(config, topology, train)))


def validate_workdir(config: ExperimentConfig, *, complete: bool = True) -> None:
    """Stage 4: refuses a workdir that cannot be written, is in use, or holds a run of another configuration.

    Also refuses a --warm_start without weights. Runs before the strategy starts; leaves no file behind.

    Args:
      config: The experiment.
      complete: Whether the configuration holds everything that the run will have. If not, `Trainer` compares the saved
        run, once it has recorded its arguments.

    Raises:
      ConfigError: The first thing that cannot work.
    """
    workdir = config.checkpoint.workdir
    if not workdir:
        if config.checkpoint.warm_start:
            run_state.check_warm_start(config.checkpoint.warm_start)
        return
    path = pathlib.Path(workdir)
    if os.path.exists(path) and not path.is_dir():
        raise ConfigError(f"--workdir={workdir} is a file. Name a directory; it is created if it does not exist.")
    found = write_error(path)
    # A resumed run, perhaps restarted by a scheduler, can continue without free space on its disk.
    if found and (found[1].errno not in (errno.ENOSPC, errno.EDQUOT) or not checkpointer.has_any(workdir)):
        raise ConfigError(unwritable_message("--workdir", workdir, *found)) from found[1]
    workdir_lock.check_free(workdir)
    if complete:
        validate_saved_run(config)
    if config.checkpoint.warm_start and checkpointer.saved_config(workdir) is None:
        run_state.check_warm_start(config.checkpoint.warm_start)


def validate_saved_run(config: ExperimentConfig) -> None:
    """Stage 5: refuses to resume the run of a workdir under another configuration.

    Args:
      config: The experiment, complete.

    Raises:
      ConfigError: Names every option that differs.
    """
    workdir = config.checkpoint.workdir
    saved = checkpointer.saved_config(workdir) if workdir else None
    if saved is not None:
        check_resumed_rounds(saved, config)
        _check_same_run(saved, config, workdir)


def validate_same_goal(topology: Topology, model: Any, goal: Any) -> None:
    """Stage 6: refuses workers that were given different losses, metrics or models.

    Creating a variable is a collective call: a worker with a metric more would wait for the others. All workers call it
    together, before they make variables, and all of them raise.

    Args:
      topology: The topology of the run.
      model: A model, or a function that builds one, of which nothing is known yet.
      goal: Losses and metrics, or an objective of the user's own.

    Raises:
      ConfigError: Names what differs, with this worker's values.
    """
    if not topology.synchronous or topology.workers == 1:
        return
    facts = {name: _described(getattr(goal, name, None)) for name in _GOAL}
    facts |= {"objective": _described(getattr(goal, "make", None)), "weights of the model": _weights_of(model)}
    agreement = WorkerAgreement(world_group(topology.workers, topology.worker), "Trainer()")
    with failure.peer_errors_named(topology.cluster):
        _refuse_differences(agreement, facts, {})


def validate_workers_agree(
    agreement: WorkerAgreement, config: ExperimentConfig, facts: Mapping[str, Any], descriptions: Mapping[str, str]
) -> None:
    """Stage 7: refuses workers that were given different flags, data or models.

    Their collective calls would have different lengths, and they would wait for each other forever. Options that may
    differ are left out (`tfpar.config.PER_HOST_OPTIONS`). All workers call it before the first step, and all of them
    raise.

    Args:
      agreement: The agreement between the workers.
      config: This worker's options.
      facts: Other values that must be equal, by their names in the message; the same names on every worker.
      descriptions: Texts for the message in place of the values of facts. They may differ, as paths do.

    Raises:
      ConfigError: Names what differs, with this worker's values.
    """
    options = {f"--{name}": value for name, value in config.as_flat_dict().items() if name not in PER_HOST_OPTIONS}
    values = {**options, **facts}
    _refuse_differences(agreement, values, descriptions)


def _weights_of(model: Any) -> Any:
    """Shapes and types, in order. Not the paths: Keras numbers the layers of all models of a process."""
    if not isinstance(model, keras.Model):
        return "made by a function"
    return [(shape_of(weight), str(weight.dtype)) for weight in model.weights]


def _described(value: Any) -> Any:
    """Losses, metrics and their weights as values that are equal on workers that were given the same."""
    if isinstance(value, Mapping):
        return {str(key): _described(each) for key, each in value.items()} or None
    if isinstance(value, list | tuple):
        return [_described(each) for each in value] or None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return getattr(value, "__qualname__", type(value).__name__)


def _refuse_differences(agreement: WorkerAgreement, values: Mapping[str, Any], descriptions: Mapping[str, str]) -> None:
    if agreement.all_equal(values):
        return
    differ = [name for name, value in values.items() if not agreement.all_equal(value)]
    text = ", ".join(f"{name} (here {descriptions.get(name, values[name])})" for name in differ)
    raise ConfigError(
        f"the workers were not given the same: {text}. Each worker must get the same flags, see the same data and "
        "build the same model; compare this message with those of the other workers."
    )


def _steps_per_epoch(config: ExperimentConfig, topology: Topology, train: inputs.AnySource) -> int:
    """Steps in an epoch; refuses, as `Pipeline` does, data that cannot be batched for this topology."""
    pipeline = inputs.build_pipeline(
        train,
        train_input(config),
        accumulate_steps=config.train.accumulate_steps,
        replicas=topology.replicas,
        workers=topology.data_workers,
        seed=config.train.seed,
    )
    # An asynchronous step is the push of one worker.
    return pipeline.steps_per_epoch * (1 if topology.synchronous else topology.workers)


def _check_not_empty(config: ExperimentConfig, role: str, source: inputs.AnySource) -> None:
    info = source.info
    if info.num_examples:
        return
    by_flag = info.name == config.input.dataset
    what = f"--dataset={info.name}: the {role} split is empty" if by_flag else f"fit({role}=...): {info.name} is empty"
    remedies = []
    if info.task == inputs.LANGUAGE_MODEL:
        length = info.label_spec.shape[0]
        remedies.append(f"give it more bytes than one window of --sequence_length={length} takes, or a shorter window")
    else:
        remedies.append("give it examples")
    if role == "validation" and by_flag:
        if info.name.startswith("tfrecord:"):  # files of one split only: holding out a part of none gives none
            remedies.append("let the pattern match files named validation* too, or none named train*")
        else:
            remedies.append(f"hold out more than --validation_fraction={config.input.validation_fraction:g}")
        remedies.append("train without evaluation: --validation_fraction=0")
    elif role == "validation":
        remedies.append("leave validation out")
    raise ConfigError(f"{what}. What to do: {'; or '.join(remedies)}.")


def _check_parameter_server(config: ExperimentConfig, train: inputs.AnySource) -> None:
    """Refuses options that asynchronous training does not support: see the messages."""
    if not isinstance(train, inputs.Source):
        raise ConfigError(
            f"--strategy=parameter_server: its workers read examples by number, and {train.name} is a tf.data.Dataset, "
            "which has none. Use tfpar.inputs.from_arrays or from_random_access, or a synchronous strategy."
        )
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
            "--deterministic: asynchronous steps arrive in no fixed order. Leave it out, or use a synchronous strategy."
        )
    if config.optimizer.ema or config.schedule.schedule == "plateau":
        raise ConfigError(
            "--ema and --schedule=plateau need steps in order; parameter_server has no order. Leave them out."
        )


def _check_labels_within_outputs(
    model: keras.Model, train: inputs.AnySource, validation: inputs.AnySource | None
) -> None:
    """Refuses labels that are not indices of outputs. On a GPU and under XLA the loss of such a label is NaN: every
    step that meets one would be skipped."""
    outputs = getattr(model, "outputs", None)
    count = outputs[0].shape[-1] if outputs and len(outputs) == 1 else None  # None: it is not a graph of layers
    for info in (source.info for source in (train, validation) if source is not None):
        if tf.nest.is_nested(info.label_spec):
            continue
        if count is not None and info.label_spec.dtype.is_integer and info.num_classes > count:
            raise ConfigError(
                f"{info.name}: the {info.split} labels lie in [0, {info.num_classes}), but the model "
                f"{model.name!r} has {count} outputs. Build it with {info.num_classes} outputs, or correct num_classes "
                "of the data: --on_bad_record=skip then leaves other labels out."
            )
        low, high = info.label_range or (0, 0)
        if low < 0 or (count is not None and high >= count):
            allowed = f"0 to {count - 1}" if count is not None else "0 or more"
            raise ConfigError(
                f"{info.name}: the {info.split} labels range from {low:g} to {high:g}, but the loss reads labels as "
                f"class numbers, which must be {allowed}. Correct the labels, or use a loss for targets, such as "
                "keras.losses.MeanSquaredError; labels that the loss ignores are named by from_arrays(ignore_class=)."
            )


def _check_compiles(config: ExperimentConfig, topology: Topology) -> None:
    """Refuses early, by its options, a model that the trainer would refuse once it is built."""
    options = models.options(config.model.model) | config.model.arguments()
    if config.train.jit_compile == "true" and topology.replicas > 1 and options.get("normalization") == "sync_batch":
        raise ConfigError(
            f"--jit_compile=true: {SYNCHRONISED}. Use --jit_compile=auto, or another --model_args=normalization."
        )


def _check_same_run(saved: Mapping[str, Any], config: ExperimentConfig, workdir: str) -> None:
    """Refuses to resume a run under another configuration; names every option that differs, with both values."""
    if other := config.differences(saved):
        raise ConfigError(
            f"--workdir={workdir} holds a run of another configuration. Differences (saved -> now): {other}. Give the "
            "saved values to continue it, another --workdir to start from the beginning, or another --workdir with "
            f"--warm_start={workdir} to start from its weights."
        )
