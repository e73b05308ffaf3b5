"""Inputs: sources of examples, the tf.data pipeline that reads them, and augmentation layers.

    config = InputConfig(dataset="digits", global_batch_size=64)
    source = build_source(config, "train")
    pipeline = Pipeline(source, config, replicas=2, seed=1)
    print(pipeline.report())
    for x, y, weight in pipeline.dataset():  # one element per step and replica, x: [A, m, 8, 8, 1]
        ...

A new kind of source is a function `(argument, config, split, seed) -> Source`; `register` gives
it a name for `--dataset`.
"""

from __future__ import annotations

import warnings
from typing import Any

from tfpar.config import InputConfig
from tfpar.inputs.augment import build as build_augmentation
from tfpar.inputs.augment import check_augmentation
from tfpar.inputs.bad_records import (
    READ_ERRORS,
    BadExample,
    BadRecordError,
    bad_record_error,
    fetch_with_mask,
    locate_bad_example,
    transient_read_error,
)
from tfpar.inputs.checks import check_divides
from tfpar.inputs.made import MadePipeline, MadeSource
from tfpar.inputs.pipeline import Pipeline
from tfpar.inputs.registry import build_source, build_splits, check_kind, kinds, load, register
from tfpar.inputs.service import check_reachable as check_service
from tfpar.inputs.source import CLASSIFICATION, FEDERATED, LANGUAGE_MODEL, REINFORCEMENT, Source, SourceInfo, Weighted
from tfpar.inputs.sources.anything import as_source
from tfpar.inputs.sources.arrays import from_arrays
from tfpar.inputs.sources.class_weights import with_class_weight
from tfpar.inputs.sources.random_access import from_random_access
from tfpar.inputs.sources.tables import from_table
from tfpar.inputs.sources.tokens import from_text
from tfpar.inputs.streams import (
    ENDLESS,
    StreamPipeline,
    StreamSource,
    from_dataset,
    from_iterable,
    stream_ended,
    stream_error,
)
from tfpar.inputs.streams import POSITION as STREAM_POSITION

__all__ = [
    "CLASSIFICATION",
    "ENDLESS",
    "FEDERATED",
    "LANGUAGE_MODEL",
    "POSITION_PREFIX",
    "READ_ERRORS",
    "REINFORCEMENT",
    "STREAM_POSITION",
    "AnyPipeline",
    "AnySource",
    "BadExample",
    "BadRecordError",
    "MadePipeline",
    "MadeSource",
    "Pipeline",
    "ReadSource",
    "Source",
    "SourceInfo",
    "StreamPipeline",
    "StreamSource",
    "Weighted",
    "as_source",
    "bad_record_error",
    "build_augmentation",
    "build_pipeline",
    "build_source",
    "build_splits",
    "check_augmentation",
    "check_divides",
    "check_kind",
    "check_service",
    "fetch_with_mask",
    "from_arrays",
    "from_dataset",
    "from_iterable",
    "from_random_access",
    "from_table",
    "from_text",
    "kinds",
    "load",
    "locate_bad_example",
    "register",
    "stream_ended",
    "stream_error",
    "transient_read_error",
    "with_class_weight",
]

# Prefix of the names under which a checkpoint holds the position of a worker's input.
POSITION_PREFIX = "input/"

ReadSource = Source | StreamSource
AnySource = ReadSource | MadeSource
AnyPipeline = Pipeline | StreamPipeline | MadePipeline


def build_pipeline(
    source: AnySource,
    config: InputConfig,
    *,
    accumulate_steps: int = 1,
    replicas: int = 1,
    workers: int = 1,
    seed: int = 0,
    training: bool = True,
) -> AnyPipeline:
    """Returns the `Pipeline`, `StreamPipeline` or `MadePipeline` of a source; see these for the arguments."""
    if isinstance(source, MadeSource):
        return MadePipeline(source, config.global_batch_size, accumulate_steps=accumulate_steps, replicas=replicas)
    layout: dict[str, Any] = {
        "accumulate_steps": accumulate_steps,
        "replicas": replicas,
        "workers": workers,
        "training": training,
    }
    if isinstance(source, StreamSource):
        return StreamPipeline(source, config, **layout)
    return Pipeline(source, config, seed=seed, **layout)


# The names of version 0.1.0; version 0.3 removes them.
_DEPRECATED = {
    "fetch_usable": "fetch_with_mask",
    "find_bad": "locate_bad_example",
    "passing_error": "transient_read_error",
}


def __getattr__(name: str) -> Any:
    if name in _DEPRECATED:
        successor = _DEPRECATED[name]
        warnings.warn(f"tfpar.inputs.{name} is deprecated; use {successor}", DeprecationWarning, stacklevel=2)
        return globals()[successor]
    raise AttributeError(f"module 'tfpar.inputs' has no attribute {name!r}")
