"""Sources by name: the values of `--dataset`.

| `--dataset` | examples |
|---|---|
| `digits` | scikit-learn's 1,797 handwritten digits, read through TFDS |
| `tfds:NAME[/CONFIG][:VERSION][:TRAIN[,VALIDATION]]` | a prepared TensorFlow Datasets data set |
| `text[:PATH]` | byte-level language modelling over files; default the standard library's sources |
| `images:DIR` | a folder of images per class |
| `csv:GLOB?label=COLUMN`, `parquet:GLOB?label=COLUMN` | tables; `tfpar.inputs.sources.tables` lists the options |
| `tfrecord:GLOB` | shards written by `python -m tfpar.inputs.write` |
| `synthetic:SHAPE[:CLASSES[:EXAMPLES]]` | generated, learnable examples |
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tfpar.config import ConfigError, InputConfig, unknown_name
from tfpar.inputs.source import Source

Builder = Callable[[str, InputConfig, str, int], Source]

SPLITS = ("train", "validation")
# Modules and functions by kind, imported at first use, so that TFDS and scikit-learn cost nothing unless they are used.
_MODULES = {
    kind: (f"tfpar.inputs.sources.{kind}", "build")
    for kind in ("digits", "images", "synthetic", "text", "tfds", "tfrecord")
} | {kind: ("tfpar.inputs.sources.tables", f"build_{kind}") for kind in ("csv", "parquet")}
_REGISTERED: dict[str, Builder] = {}


def register(kind: str, builder: Builder) -> None:
    """Registers a source for `--dataset=KIND[:ARGUMENT]`.

    Args:
      kind: The word before the colon; must not be registered yet.
      builder: `(argument, config, split, seed) -> Source`, with split `"train"` or `"validation"`.

    Raises:
      ValueError: The name is empty, taken, or contains a colon.
    """
    if kind in _MODULES or kind in _REGISTERED or ":" in kind or not kind:
        raise ValueError(f"source kind {kind!r} is empty, taken or contains a colon")
    _REGISTERED[kind] = builder


def kinds() -> tuple[str, ...]:
    """Returns the words that may precede the colon in `--dataset`, sorted."""
    return tuple(sorted({*_MODULES, *_REGISTERED}))


def check_kind(config: InputConfig) -> None:
    """Raises ConfigError, with suggestions, if the kind of source in `--dataset` is unknown. Reads no data."""
    kind = config.dataset.partition(":")[0]
    if kind not in kinds():
        raise unknown_name("--dataset", kind, kinds())


def load(dataset: str, split: str = "train", **options: Any) -> Source:
    """Returns the source of a data set by name, for use from Python.

    Args:
      dataset: A value of `--dataset`.
      split: `"train"` or `"validation"`.
      **options: Other options of `tfpar.config.InputConfig`.

    Raises:
      ConfigError: As for `build_source`.
    """
    return build_source(InputConfig(dataset=dataset, **options), split)


def build_splits(config: InputConfig, seed: int = 0) -> tuple[Source, Source | None]:
    """Returns the training and the validation source that `--dataset` names.

    Args:
      config: The input options.
      seed: Seed of generated sources.

    Returns:
      Both sources; None for validation if `--validation_fraction=0` holds nothing out and the data set has no
      validation split: such a run is not evaluated.

    Raises:
      ConfigError: As for `build_source`.
    """
    train, validation = (build_source(config, split, seed) for split in SPLITS)
    no_validation = config.validation_fraction == 0 and not validation.info.num_examples
    return train, None if no_validation else validation


def build_source(config: InputConfig, split: str, seed: int = 0) -> Source:
    """Returns the source that `--dataset` names.

    Args:
      config: The input options.
      split: `"train"` or `"validation"`.
      seed: Seed of generated sources. Which examples are held out never depends on it.

    Raises:
      ConfigError: The name is unknown (with suggestions), the data is missing or unsuitable, or a
        label is out of range.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split!r} must be 'train' or 'validation'.")
    check_kind(config)
    kind, _, argument = config.dataset.partition(":")
    if kind in _REGISTERED:
        source = _REGISTERED[kind](argument, config, split, seed)
        if not isinstance(source, Source):
            raise ConfigError(
                f"--dataset={config.dataset}: the function that was registered for {kind!r} returned "
                f"{type(source).__name__}. Return a tfpar.inputs.Source, for example of tfpar.inputs.from_arrays."
            )
        return source
    module, function = _MODULES[kind]
    builder: Builder = getattr(importlib.import_module(module), function)
    return builder(argument, config, split, seed)
