"""`.keras` files, and whether their models fit a source of examples."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from tfpar import inputs, models
from tfpar.checkpoint import checkpointer
from tfpar.checkpoint.keras_file import check_model_file
from tfpar.config import CUSTOM, ConfigError, ExperimentConfig

import keras
import tensorflow as tf

# Packages whose classes Keras 3.15 imports by name.
_LOADED_BY_KERAS = ("keras", "keras_hub", "keras_cv", "keras_nlp")
_TABLES = ("csv:", "parquet:")


def task_spec(source: inputs.AnySource) -> models.TaskSpec:
    """The input shape and number of classes that a model needs for the examples of a source.

    Raises:
      ConfigError: The source has several inputs or labels, or no label, which no model of `--model` supports; or its
        number of classes is unknown.
    """
    info = source.info
    if tf.nest.is_nested(info.input_spec) or tf.nest.is_nested(info.label_spec):
        columns = isinstance(info.input_spec, Mapping) and info.name.startswith(_TABLES)
        vector = "With as=vector in --dataset, the numeric columns are one input. Or pass" if columns else "Pass"
        raise ConfigError(
            f"--dataset={info.name}: the models of --model take one input and one label per example, but this source "
            f"has several, or no label. {vector} your own model to tfpar.Trainer."
        )
    if not info.num_classes:
        raise ConfigError(
            f"--dataset={info.name}: the models of --model need the number of classes, which this source does not "
            "give. Give num_classes= where you create it, or pass your own model to tfpar.Trainer."
        )
    return models.TaskSpec(
        task=info.task,
        input_shape=tuple(info.input_spec.shape),
        input_dtype=info.input_spec.dtype.name,
        num_classes=info.num_classes,
    )


def examples_of_run(config: ExperimentConfig, path: str, given: Callable[[str], bool]) -> ExperimentConfig:
    """The configuration with the examples of the run in whose workdir, or a folder there, a `.keras` file is.

    Which examples were held out depends on options such as `validation_fraction`: other values would evaluate a model
    on its training examples.

    Args:
      config: The configuration from the command line.
      path: The file.
      given: Whether an option was given there; given options keep their values. If another data set is given, all do.

    Raises:
      ConfigError: No data set is given, and no run beside the file says which one it had.
    """
    # The workdir, or a folder in it: an online run keeps its models in exports/NAME.
    beside = (checkpointer.saved_config(folder) for folder in [*pathlib.Path(path).absolute().parents][:3])
    saved = next(filter(None, beside), {})
    dataset = saved.get("dataset", CUSTOM)
    if dataset == CUSTOM and not given("dataset"):
        known = "the run beside it had examples of a program's own" if saved else "it is not in the workdir of a run"
        raise ConfigError(
            f"--model_file={path}: {known}, so its examples are not known. Name them: --dataset=..., and what else the "
            "model was trained with, such as --validation_fraction and --seed, which say what was held out. If only a "
            "program has them, call evaluate or export of keras.saving.load_model(FILE) in it."
        )
    if dataset == CUSTOM or (given("dataset") and dataset != config.input.dataset):
        return config
    options = ("dataset", "validation_fraction", "sequence_length", "image_size", "resize", "crop", "seed")
    taken = {name: saved[name] for name in options if name in saved and not given(name)}
    return ExperimentConfig.from_flat_dict({**config.as_flat_dict(), **taken})


def unloadable_parts(model: keras.Model) -> list[str]:
    """The parts of a model that keep `keras.saving.load_model` from loading its `.keras` file in safe mode.

    Args:
      model: Any Keras model.

    Returns:
      Names of classes and functions outside Keras that are not registered, and of Lambda layers; empty for none.
    """
    found: list[str] = []

    def visit(part: Any) -> None:
        if isinstance(part, dict) and {"module", "class_name", "registered_name"} <= part.keys():
            kind, module = part["class_name"], part["module"] or ""
            name = part["config"] if kind == "function" else part["registered_name"] or kind
            if kind in ("__lambda__", "Lambda"):
                found.append("a Lambda layer")
            elif module.partition(".")[0] not in _LOADED_BY_KERAS and (
                not isinstance(name, str) or keras.saving.get_registered_object(name) is None
            ):
                found.append(str(name) if kind == "function" else f"{module}.{kind}")
        for value in part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple)) else ():
            visit(value)

    try:
        visit(keras.saving.serialize_keras_object(model))
    except (NotImplementedError, TypeError, ValueError) as error:
        found.append(f"{type(model).__name__}, which gives no configuration ({error})")
    return list(dict.fromkeys(found))


def load_model(path: str, spec: models.TaskSpec | None = None, *, flag: str = "--model_file") -> keras.Model:
    """Loads a `.keras` file in Keras' safe mode: nothing in it is executed.

    Args:
      path: The file.
      spec: If given, the model's inputs and outputs are checked against it.
      flag: The flag that named the file, for errors.

    Raises:
      ConfigError: No such file, not a `.keras` file, a damaged one, or a model for other examples.
    """
    check_model_file(path, flag=flag)
    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:  # Keras 3.15 does not check what it reads: a damaged file may raise anything
        raise ConfigError(f"{flag}={path} cannot be loaded: {error}") from error
    if spec is not None:
        _check_fits(model, spec, f"{flag}={path}")
    return model


def _check_fits(model: keras.Model, spec: models.TaskSpec, named: str) -> None:
    """Refuses a model for other examples; `None` in its shapes fits any number.

    Args:
      model: The model.
      spec: What it must fit.
      named: The flag and the file, for errors.
    """
    # A subclassed model has neither, and a Sequential model only once it is built.
    takes, gives = getattr(model, "inputs", None), getattr(model, "outputs", None)
    if not takes or not gives:
        raise ConfigError(
            f"{named} has a model whose inputs and outputs are not known before it is called (a subclassed one, or one "
            "that was never built), so it cannot be compared with the data set. Call evaluate or export of "
            "keras.saving.load_model(FILE) in a program."
        )
    if len(takes) > 1 or len(gives) > 1:
        raise ConfigError(
            f"{named} has a model with {len(takes)} x input and {len(gives)} x output; the data set has one input and "
            "one label. Call evaluate or export of keras.saving.load_model(FILE) in a program. (A policy has no data "
            "set: leave it beside the checkpoints of its run.)"
        )
    shape, classes = tuple(takes[0].shape[1:]), gives[0].shape[-1]
    fits = tf.TensorShape(shape).is_compatible_with(spec.input_shape)
    if not fits or classes not in (None, spec.num_classes):
        raise ConfigError(
            f"{named} takes inputs {shape} and gives {classes} outputs; the data set has inputs {spec.input_shape} and "
            f"{spec.num_classes} classes. Give the --dataset it was trained on. (A policy has none: leave it beside "
            "the checkpoints of its run.)"
        )
