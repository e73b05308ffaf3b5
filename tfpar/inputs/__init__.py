"""Inputs: sources of examples, one tf.data pipeline behind all of them, augmentation layers.

    config = InputConfig(dataset="digits", global_batch_size=64)
    source = build_source(config, "train")
    pipeline = Pipeline(source, config, replicas=2, seed=1)
    print(pipeline.report())
    for x, y, weight in pipeline.dataset():  # one element per update and replica, x: [A, m, 8, 8, 1]
        ...

A new kind of source is a function `(argument, config, split, seed) -> Source`; `register` gives
it a name for `--dataset`.
"""

from tfpar.inputs.augment import build as build_augmentation
from tfpar.inputs.augment import check_augmentation
from tfpar.inputs.bad_records import READ_ERRORS, BadExample, BadRecordError, fetch_usable, passing_error
from tfpar.inputs.bad_records import error as bad_record_error
from tfpar.inputs.bad_records import find as find_bad
from tfpar.inputs.checks import check_divides
from tfpar.inputs.pipeline import Pipeline
from tfpar.inputs.registry import build_source, build_splits, check_kind, kinds, load, register
from tfpar.inputs.service import check_reachable as check_service
from tfpar.inputs.source import CLASSIFICATION, LANGUAGE_MODEL, Source, SourceInfo
from tfpar.inputs.sources.arrays import from_arrays

__all__ = [
    "CLASSIFICATION",
    "LANGUAGE_MODEL",
    "READ_ERRORS",
    "BadExample",
    "BadRecordError",
    "Pipeline",
    "Source",
    "SourceInfo",
    "bad_record_error",
    "build_augmentation",
    "build_source",
    "build_splits",
    "check_augmentation",
    "check_divides",
    "check_kind",
    "check_service",
    "fetch_usable",
    "find_bad",
    "from_arrays",
    "kinds",
    "load",
    "passing_error",
    "register",
]
