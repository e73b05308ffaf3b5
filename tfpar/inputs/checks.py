"""Checks of a pipeline before anything starts; the errors give the numbers and say what to do."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import service, structures
from tfpar.inputs.source import Source, SourceInfo

import tensorflow as tf


def check_source(
    source: Source, config: InputConfig, *, replicas: int, workers: int, accumulate_steps: int, training: bool
) -> None:
    """Raises ConfigError if these workers and replicas cannot read the source.

    Args:
      source: The examples.
      config: The input options.
      replicas: Number of replicas over all workers.
      workers: Number of workers that read.
      accumulate_steps: Micro-batches per step.
      training: Whether the pipeline trains; evaluation pads, so it accepts any batch size.
    """
    _check_examples(source, config, training)
    if training:
        check_divides(config, replicas, accumulate_steps)
    if training and config.shard_by == "file":
        _check_files(source, config, workers)
    if config.data_service:
        service.check_source(config.data_service, source)


def check_same_shapes(train: SourceInfo, validation: SourceInfo) -> None:
    """Raises ConfigError if validation examples have other shapes or other classes than training examples.

    Args:
      train: Describes the training examples.
      validation: Describes the validation examples.
    """
    for what, of_train, of_validation in (
        ("inputs", train.input_spec, validation.input_spec),
        ("labels", train.label_spec, validation.label_spec),
    ):
        if not tf.nest.flatten(of_validation) and tf.nest.flatten(of_train):
            raise ConfigError(f"{validation.name}: the validation examples have no {what}. Give validation=(x, y).")
        single = not (tf.nest.is_nested(of_train) or tf.nest.is_nested(of_validation))
        if single:
            same = of_train.shape.is_compatible_with(of_validation.shape)
        else:
            same = _with_equal_integers(of_train) == _with_equal_integers(of_validation)
        if not same:
            found, expected = (
                spec.shape if single else structures.describe_specs(spec) for spec in (of_validation, of_train)
            )
            listed = isinstance(of_validation, tuple) and not tf.nest.flatten(validation.label_spec)
            raise ConfigError(
                f"{validation.name}: the validation {what} have shape {found}, the training {what} "
                f"{expected}. Give validation examples of the same shape as the training examples."
                f"{' A list is several inputs; a tuple (x, y) has labels.' if listed else ''}"
            )
    _check_same_classes(train, validation)


def _check_same_classes(train: SourceInfo, validation: SourceInfo) -> None:
    """Refuses names of classes that have other numbers among the validation examples."""
    names, found = train.class_names, validation.class_names
    if not names or found == names[: len(found)]:
        return
    number = next(
        (number for number, pair in enumerate(zip(names, found, strict=False)) if len(set(pair)) > 1), len(names)
    )
    trained = repr(names[number]) if number < len(names) else "not known"
    raise ConfigError(
        f"{validation.name}: class {number} of the validation examples is {found[number]!r}, but that of the training "
        f"examples is {trained}. Number the classes of both alike: categories={{COLUMN: names}} of "
        "tfpar.inputs.from_table, the same class folders, or one data set for both."
    )


def _with_equal_integers(specs: structures.Structure) -> structures.Structure:
    """Returns specs with int64 for int32, which only depends on how large the numbers of a split are."""
    return structures.map_arrays(
        lambda spec: tf.TensorSpec(spec.shape, tf.int64 if spec.dtype == tf.int32 else spec.dtype), specs
    )


def check_epoch(config: InputConfig, sizes: Sequence[int], steps_per_epoch: int) -> None:
    """Raises ConfigError if an epoch has no steps, which --remainder=drop can cause with file shards.

    Args:
      config: The input options.
      sizes: Number of examples of each shard.
      steps_per_epoch: Number of steps per epoch.
    """
    if not steps_per_epoch:
        raise ConfigError(
            f"--remainder=drop with --shard_by=file leaves no steps: a worker has {min(sizes)} examples, fewer than "
            f"its share of --global_batch_size={config.global_batch_size}. Use --remainder=pad, --shard_by=example "
            "or a smaller batch."
        )


def _check_examples(source: Source, config: InputConfig, training: bool) -> None:
    info = source.info
    if not info.num_examples:
        hint = "Give a data set with examples."
        if info.task == "language_model":
            hint = f"It needs more text than one window of --sequence_length={config.sequence_length} bytes."
        if info.split == "validation":
            hint += (
                f" --validation_fraction={config.validation_fraction} of the training data is held out if there is no "
                "validation split."
            )
        raise ConfigError(f"--dataset={info.name}: the {info.split} split is empty. {hint}")
    dropped = config.remainder == "drop" and not info.may_be_short
    if training and dropped and config.global_batch_size > info.num_examples:
        raise ConfigError(
            f"--remainder=drop leaves no steps: --global_batch_size={config.global_batch_size} is more than the "
            f"{info.num_examples} examples of the {info.split} split of --dataset={info.name}. Use --remainder=pad, or "
            f"a batch of at most {info.num_examples}."
        )


def check_divides(config: InputConfig, replicas: int, accumulate_steps: int) -> None:
    """Raises ConfigError unless the batch is divisible by replicas x micro-batches, or --uneven_batches is on."""
    batch, parts = config.global_batch_size, replicas * accumulate_steps
    if batch % parts == 0 or config.uneven_batches:
        return
    below, above = batch // parts * parts, -(-batch // parts) * parts
    near = f"{below} or {above}" if below else str(above)
    raise ConfigError(
        f"--global_batch_size={batch} is not divisible by {replicas} replicas x {accumulate_steps} micro-batches = "
        f"{parts} ({batch} = {batch // parts} x {parts} + {batch % parts}). The nearest divisible sizes: {near}; or "
        "use --uneven_batches=true, which pads smaller shares and keeps the weighting exact."
    )


def _check_files(source: Source, config: InputConfig, workers: int) -> None:
    info = source.info
    if not info.files:
        raise ConfigError(f"--shard_by=file: {info.name} has no files. Use --shard_by=example.")
    filled = sum(1 for records in info.records_per_file if records)
    if filled < workers:
        raise ConfigError(
            f"--shard_by=file needs a file with examples for each of {workers} workers, but the {info.split} split of "
            f"--dataset={info.name} has {filled}. Use --shard_by=example, or write more shards: python -m "
            f"tfpar.inputs.write --dataset={info.name} --shards={workers} --output=DIR, then --dataset=tfrecord:DIR."
        )
    if config.global_batch_size < workers:
        raise ConfigError(
            f"--shard_by=file gives each worker its own share of --global_batch_size={config.global_batch_size}, which "
            f"must be at least the number of workers, {workers}. Increase it, or use --shard_by=example."
        )
