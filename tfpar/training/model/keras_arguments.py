"""Arguments of `Trainer`'s methods: examples in any form, and arguments of Keras' methods that it refuses."""

from __future__ import annotations

import difflib
import logging
import numbers
from collections.abc import Mapping
from typing import Any

from tfpar import inputs
from tfpar.checkpoint import checkpointer
from tfpar.config import ConfigError

import tensorflow as tf

_log = logging.getLogger(__name__)

_INSTEAD = {
    "batch_size": "the batch is Trainer(global_batch_size=...), over all replicas, or Trainer(eval_batch_size=...)",
    "initial_epoch": "a run resumes automatically if its Trainer(workdir=...) has a checkpoint",
    "max_queue_size": "the input pipeline is Trainer(prefetch=..., input_threads=...)",
    "return_dict": "the result is always a dict",
    "sample_weights": "give sample_weight=",
    "shuffle": "give Trainer(shuffle=...)",
    "steps_per_epoch": "the length of a run is steps=; Trainer(eval_every=...) is the interval between evaluations",
    "use_multiprocessing": "give Trainer(input_threads=...)",
    "validation_batch_size": "give Trainer(eval_batch_size=...)",
    "validation_data": "give validation=(x, y)",
    "validation_freq": "give Trainer(eval_every=...), in steps",
    "validation_split": "give validation=(x, y) with examples that you have held out",
    "validation_steps": "give Trainer(eval_steps=...)",
    "verbose": "give Trainer(verbose=...)",
    "workers": "give Trainer(input_threads=...)",
    "x": "give the examples first, without a name",
}


_SOURCES = (inputs.Source, inputs.StreamSource, tf.data.Dataset)
_KNOWN = {
    "fit": ("y", "sample_weight", "class_weight", "steps", "epochs", "validation", "hooks", "callbacks"),
    "evaluate": ("y", "sample_weight", "steps", "callbacks"),
    "predict": ("callbacks",),
}


def refuse(method: str, given: Mapping[str, Any]) -> None:
    """Refuses arguments that a method does not have.

    Args:
      method: `fit`, `evaluate` or `predict`.
      given: The arguments.

    Raises:
      ConfigError: There is one, with what to write instead.
    """
    known = _KNOWN[method]
    for name in given:
        near = difflib.get_close_matches(name, known, n=1)
        others = f"besides the examples it takes {', '.join(known)}."
        instead = f"{_INSTEAD[name]}." if name in _INSTEAD else f"did you mean {near[0]}=?" if near else others
        raise ConfigError(f"Trainer.{method} takes no {name}=: {instead}")


def batches(method: str, steps: int | None) -> int:
    """The number of batches that `steps` of a method stands for; 0: all.

    Raises:
      ConfigError: It is no whole number of at least 0.
    """
    if steps is not None and (not isinstance(steps, numbers.Integral) or isinstance(steps, bool) or steps < 0):
        raise ConfigError(f"Trainer.{method}(steps={steps!r}): give a whole number of batches, at least 1; None: all.")
    return int(steps or 0)


def as_full_source(argument: str, *data: Any, **options: Any) -> inputs.ReadSource:
    """`as_source` for data with at least one example."""
    source = as_source(argument, *data, **options)
    if not source.info.num_examples:
        raise ConfigError(f"{argument}: {source.info.name} is empty. Give it at least one example.")
    return source


def warn_of_checkpoint(workdir: str) -> None:
    """Warns if a workdir has a checkpoint, before its trainer evaluates or predicts without having read it."""
    if workdir and checkpointer.has_any(workdir):
        _log.warning(
            "--workdir=%s has a checkpoint, but only fit reads it: the model is evaluated with the weights that it has "
            "now. Call fit first, which takes no step if the run is finished, or give warm_start=%s.",
            workdir,
            workdir,
        )


def as_inputs(argument: str, data: Any, **options: Any) -> inputs.ReadSource:
    """`as_full_source` without the labels of arrays, which a prediction does not read and which need not be good."""
    inputs_alone = data[:1] if isinstance(data, tuple) and len(data) <= 3 else data
    return as_full_source(argument, inputs_alone, **options)


def as_source(
    argument: str,
    data: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    counts: bool = True,
    split: str = "validation",
    told: bool = True,
    ignore_class: int | None = None,
    num_classes: int | None = None,
    on_bad_record: str = "fail",
    batch_size: int = 0,
    steps: int = 0,
) -> inputs.ReadSource:
    """The source for the argument of a method.

    Args:
      argument: Its name in errors.
      data: A source, or anything that `tfpar.inputs.as_source` takes.
      y: Labels, if the data are arrays.
      sample_weight: Sample weights, if the data are arrays.
      counts: Whether the number of examples must be known.
      split: `"train"` or `"validation"`, for reports.
      told: Whether to log the counting of examples.
      ignore_class: A label that the loss ignores.
      num_classes: 0 if labels are no classes, whatever their dtype; None: as the function that makes the source says.
      on_bad_record: `"skip"` to train without examples whose values are not finite, or whose labels are no classes.
      batch_size: Examples in a batch of an evaluation.
      steps: Batches of the evaluation that reads it; 0: all, which is an error for a stream without an end.
    """
    if (
        isinstance(data, Mapping)
        and y is None
        and data
        and all(isinstance(each, (*_SOURCES, tuple)) for each in data.values())
    ):
        raise ConfigError(
            f"{argument}: {', '.join(map(str, data))} are several data sets. Give one of them; "
            "Trainer.evaluate({...}) evaluates several, also in a hook or callback of fit."
        )
    checks = {"ignore_class": ignore_class, "num_classes": num_classes, "on_bad_record": on_bad_record}
    try:
        source = inputs.as_source(data, y, sample_weight, split=split, **checks)
        if counts and isinstance(source, inputs.StreamSource):
            return source.counted(told=told, read=steps * batch_size)
        return source
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}") from error
