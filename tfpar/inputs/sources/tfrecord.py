"""`tfrecord:GLOB`: TFRecord shards with a `features.json` in the same directory, with random access.

`python -m tfpar.inputs.write` creates both from any source. Each record is a `tf.train.Example`
whose features `x` and `y` hold the raw little-endian bytes of the example as its source stores
it, so that three ops parse a whole batch. Several inputs or labels have a feature each (`x/NAME`),
and text is stored as such. `features.json` describes how to read the records.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import logging
import os
from collections.abc import Sequence
from typing import Any

from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import memory, records, source, structures
from tfpar.inputs.source import Source, SourceInfo, Weighted
from tfpar.inputs.sources.columns import records as record_columns
from tfpar.inputs.sources.columns.records import Column
from tfpar.inputs.structures import Structure
from tfpar.process.listing import listed

import numpy as np
import tensorflow as tf
from google.protobuf import message

_log = logging.getLogger(__name__)

SIDECAR = "features.json"
FORMAT = "tfpar-tfrecord-1"
FORMAT_OF_STRUCTURES = "tfpar-tfrecord-2"  # several inputs or labels, sample weights, or text
SPLITS = ("train", "validation")
_TASKS = (source.CLASSIFICATION, source.LANGUAGE_MODEL)
_TEXT_CODES = {"bytes": source.decode_bytes}
_KINDS = {
    **dict.fromkeys(("name", "task", "input_dtype", "stored_input_dtype", "stored_label_dtype", "label_dtype"), str),
    **dict.fromkeys(("input_shape", "label_shape", "class_names"), list),
    "text": str,
    "num_classes": int,
    "records": dict,
}
_LARGEST_DIM = 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """The contents of `features.json`: the format of the records, and the number of records per shard.

    Attributes:
      name: The source of the examples, in the notation of `--dataset`.
      task: `"classification"` or `"language_model"`.
      input_shape: Shape of `x` of one example.
      input_dtype: Dtype of `x` as `Source.fetch` returns it, by name.
      stored_input_dtype: Dtype of `x` in the records.
      label_shape: Shape of `y` of one example.
      stored_label_dtype: Dtype of `y` in the records.
      scale: Factor from stored to fetched inputs.
      num_classes: Labels lie in `[0, num_classes)`.
      class_names: Names in label order, or empty.
      text: How tokens are decoded to text: `"bytes"`, or empty if they are not text.
      records: Number of records by file name.
      label_dtype: Dtype of `y` as `Source.fetch` returns it.
      inputs: For several inputs: their structure, see `tfpar.inputs.sources.columns.records`. The fields about `x` and
        `y` are then ignored.
      labels: The structure of the labels; present together with `inputs`.
      format: Version of this format.
    """

    name: str
    task: str
    input_shape: list[int]
    input_dtype: str
    stored_input_dtype: str
    label_shape: list[int]
    stored_label_dtype: str
    scale: float | list[float]
    num_classes: int
    class_names: list[str]
    text: str
    records: dict[str, int]
    label_dtype: str = "int32"
    inputs: dict[str, Any] | None = None
    labels: dict[str, Any] | None = None
    format: str = FORMAT

    def columns(self) -> tuple[Structure, Structure]:
        """Returns the columns of the inputs and of the labels, in their structures."""
        if self.inputs is not None and self.labels is not None:
            return record_columns.from_json("x", self.inputs), record_columns.from_json("y", self.labels)
        x = Column("x", tf.as_dtype(self.stored_input_dtype), tuple(self.input_shape), tf.as_dtype(self.input_dtype))
        y = Column("y", tf.as_dtype(self.stored_label_dtype), tuple(self.label_shape), tf.as_dtype(self.label_dtype))
        return x, y


def describe(examples: Source, stored: source.Batch, counts: dict[str, int]) -> Features:
    """Returns the `Features` of a source.

    Args:
      examples: The source.
      stored: Any batch of its `read`, for the stored dtypes.
      counts: Number of records by file name.
    """
    info = examples.info
    single = structures.is_single(info.input_spec) and structures.is_single(info.target_spec)
    x, y = (structures.named_leaves(specs) for specs in (info.input_spec, info.target_spec))
    structure: dict[str, Any] = {
        "inputs": record_columns.to_json(info.input_spec, stored[0]),
        "labels": record_columns.to_json(info.target_spec, stored[1]),
        "format": FORMAT_OF_STRUCTURES,
    }
    return Features(
        name=info.name,
        task=info.task,
        input_shape=x[0][1].shape.as_list() if single else [],
        input_dtype=x[0][1].dtype.name if single else "float32",
        stored_input_dtype=stored[0].dtype.name if single else "float32",
        label_shape=y[0][1].shape.as_list() if single else [],
        label_dtype=y[0][1].dtype.name if single else "int32",
        stored_label_dtype=stored[1].dtype.name if single else "int32",
        scale=examples.scale if structures.is_single(examples.scale) else tf.nest.flatten(examples.scale),
        **({} if single and not _is_text(x + y) else structure),
        num_classes=info.num_classes,
        class_names=list(info.class_names),
        text=next((name for name, decode in _TEXT_CODES.items() if info.decode is decode), ""),
        records=counts,
    )


def _is_text(leaves: list[tuple[str, tf.TensorSpec]]) -> bool:
    return any(spec.dtype == tf.string for _, spec in leaves)


def serialise(x: Structure, y: Structure) -> bytes:
    """Serialises the stored values of one example, arrays in the structure of its source, as a `tf.train.Example`."""
    feature = {
        "/".join(filter(None, (key, path))): tf.train.Feature(bytes_list=tf.train.BytesList(value=_raw(value)))
        for key, part in (("x", x), ("y", y))
        for path, value in structures.named_leaves(part)
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def build(argument: str, config: InputConfig, split: str, seed: int) -> Source:
    """`--dataset=tfrecord:GLOB`, a pattern or a directory of `.tfrecord` files.

    Files whose names start with `train` or `validation` belong to that split, and a warning names the others, which are
    left out. If the pattern matches only those of `train`, those of `validation` in the same directory belong to it,
    too; if there are none, the last `--validation_fraction` of the training records is held out. So is that of all
    records if the pattern matches no such names.

    Args:
      argument: The pattern or directory.
      config: The input options; uses `cache`, `validation_fraction` and `on_bad_record`.
      split: `"train"` or `"validation"`.
      seed: Not used; the split does not depend on it.

    Raises:
      ConfigError: Nothing matches, `features.json` is missing or has another format, or a shard
        is damaged or compressed, or has another number of records than `features.json` says.
    """
    name = f"tfrecord:{argument}"
    paths = _shards(name, argument)
    features = _load_sidecar(name, os.path.dirname(paths[0]))
    named = {part: [path for path in paths if os.path.basename(path).startswith(part)] for part in SPLITS}
    if any(named.values()) and split == "train":
        _warn_of_others(name, paths, [*named["train"], *named["validation"]])
    if named["train"] and not named["validation"]:
        named["validation"] = _validation_files(os.path.dirname(paths[0]))
    if named["validation"]:
        reader = _reader(named[split], features)
    else:
        whole = _reader(named["train"] or paths, features)
        reader = _held_out_part(whole, config.validation_fraction, split == "train")
    return _source_of(name, config, split, reader, features)


def _warn_of_others(name: str, paths: Sequence[str], used: Sequence[str]) -> None:
    """Warns of files that belong to no split, because only the names of others say to which they belong."""
    others = [os.path.basename(path) for path in paths if path not in used]
    if others:
        _log.warning(
            "--dataset=%s: files left out because their names start neither with train nor with validation, as those "
            "of other files do: %s. Rename them, or give a pattern that matches one kind of names.",
            name,
            listed(others, 5),
        )


def _validation_files(folder: str) -> list[str]:
    """Returns the files of validation examples in a directory; a pattern for the training examples matches none."""
    return sorted(tf.io.gfile.glob(os.path.join(glob.escape(folder), "validation*.tfrecord")))


def features_of(argument: str) -> Features:
    """Returns the contents of the `features.json` in the directory of the shards of `--dataset=tfrecord:GLOB`.

    Raises:
      ConfigError: Nothing matches, or `features.json` is missing or has another format.
    """
    name = f"tfrecord:{argument}"
    return _load_sidecar(name, os.path.dirname(_shards(name, argument)[0]))


def from_files(name: str, config: InputConfig, split: str, paths: Sequence[str], features: Features) -> Source:
    """Returns a source of shards, in this order; they may be in different directories.

    Args:
      name: The data set, for reports and errors.
      config: As for `build`.
      split: `"train"` or `"validation"`.
      paths: The shards.
      features: Describes the records of the shards; their numbers per shard are ignored.

    Raises:
      ConfigError: A shard is damaged or compressed, or its records do not match the description.
    """
    reader = records.TFRecordReader([records.FileSlice(path) for path in paths])
    return _source_of(name, config, split, reader, features)


def _source_of(
    name: str, config: InputConfig, split: str, reader: records.TFRecordReader, features: Features
) -> Source:
    x_columns, y_columns = features.columns()
    labels, weights = (y_columns.y, y_columns.sample_weight) if isinstance(y_columns, Weighted) else (y_columns, ())
    info = SourceInfo(
        name=name,
        task=features.task,
        split=split,
        num_examples=len(reader),
        input_spec=tf.nest.map_structure(lambda column: column.spec, x_columns),
        label_spec=tf.nest.map_structure(lambda column: column.spec, labels),
        weight_spec=tf.nest.map_structure(lambda column: column.spec, weights),
        num_classes=features.num_classes,
        class_names=tuple(features.class_names),
        files=tuple(reader.paths),
        records_per_file=reader.records_per_file,
        decode=_TEXT_CODES.get(features.text),
    )
    columns: list[Column] = tf.nest.flatten((x_columns, y_columns))
    _check_sample(name, reader, columns)

    def read(indices: tf.Tensor) -> source.Batch:
        serialised = records.read_records(reader, indices)
        raw = tf.io.parse_example(serialised, {column.name: column.feature for column in columns})
        values = [column.decode(raw[column.name], indices) for column in columns]
        x, y = tf.nest.pack_sequence_as((x_columns, y_columns), values)
        return x, y

    scale = features.scale
    if isinstance(scale, list):
        scale = tf.nest.pack_sequence_as(x_columns, scale)
    skip = config.on_bad_record == "skip"
    stored = Source(info=info, read=read, scale=scale, portable=False, skip=skip)
    return memory.apply_cache(stored, config.cache, sum(column.bytes for column in columns))


def _shards(name: str, argument: str) -> list[str]:
    pattern = os.path.expanduser(argument)
    if tf.io.gfile.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "*.tfrecord")
    elif argument and tf.io.gfile.exists(pattern):  # its name may have brackets
        pattern = glob.escape(pattern)
    paths = sorted(tf.io.gfile.glob(pattern)) if argument else []
    if not paths:
        raise ConfigError(
            f"--dataset={name}: no file matches. Give a pattern such as tfrecord:/data/digits/*.tfrecord, or write "
            "shards with python -m tfpar.inputs.write --dataset=digits --output=DIR."
        )
    folders = sorted({os.path.dirname(path) for path in paths})
    if len(folders) > 1:
        raise ConfigError(
            f"--dataset={name}: matches lie in {len(folders)} directories ({', '.join(folders)}), but one {SIDECAR} "
            "describes one directory. Give a pattern that matches files in one directory."
        )
    return paths


def _load_sidecar(name: str, folder: str) -> Features:
    path = os.path.join(folder, SIDECAR)
    try:
        with tf.io.gfile.GFile(path) as file:
            content: dict[str, Any] = json.loads(file.read())
        if content.get("format") not in (FORMAT, FORMAT_OF_STRUCTURES):
            raise ValueError(f"its format is {content.get('format')!r}, not {FORMAT!r} or {FORMAT_OF_STRUCTURES!r}")
        features = Features(**content)
        _check_kinds(features)
        return features
    except (OSError, tf.errors.OpError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"--dataset={name} needs {path!r}, which describes the records: {error}. "
            "python -m tfpar.inputs.write creates it in the directory of the shards."
        ) from error


def _check_kinds(features: Features) -> None:
    """Refuses values that nothing but another program or an editor can have written: they would fail later, unnamed.

    Raises:
      ValueError: Names the first.
    """
    for name, kind in _KINDS.items():
        value = getattr(features, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"its {name} is {value!r}")
    for name, known in (("task", _TASKS), ("text", ("", *_TEXT_CODES))):
        if (value := getattr(features, name)) not in known:
            raise ValueError(f"its {name} is {value!r}, not {' or '.join(map(repr, known))}")
    if features.num_classes < 0:
        raise ValueError(f"its num_classes is {features.num_classes}, not a number of classes")
    if not all(isinstance(name, str) for name in features.class_names):
        raise ValueError(f"its class_names are {features.class_names}")
    if not all(isinstance(count, int) for count in features.records.values()):
        raise ValueError(f"its records are {features.records}")
    x_columns, _ = features.columns()
    columns: list[Column] = tf.nest.flatten(features.columns())
    for column in columns:
        if not all(isinstance(size, int) and 0 <= size <= _LARGEST_DIM for size in column.shape):
            raise ValueError(f"the shape of {column.name} is {list(column.shape)}")
        for dtype in (column.dtype, column.fetched):
            if not (structures.is_number(dtype) or (dtype == tf.string and features.inputs is not None)):
                raise ValueError(f"its dtype {dtype.name!r} is not numeric")
    scale = features.scale
    scales: list[float] = scale if isinstance(scale, list) else [scale]
    if not all(isinstance(factor, int | float) for factor in scales):
        raise ValueError(f"its scale is {scale!r}")
    if isinstance(scale, list) and (features.inputs is None or len(scale) != len(tf.nest.flatten(x_columns))):
        raise ValueError(f"its scale has {len(scale)} factors, not one for each input")


def _reader(paths: list[str], features: Features) -> records.TFRecordReader:
    reader = records.TFRecordReader([records.FileSlice(path) for path in paths])
    for path, count in zip(reader.paths, reader.records_per_file, strict=True):
        expected = features.records.get(os.path.basename(path), count)
        if count != expected:
            raise ConfigError(
                f"TFRecord file {path!r} holds {count} records, but {SIDECAR} says {expected}: the two do not belong "
                "together. Write the shards again."
            )
    return reader


def _check_sample(name: str, reader: records.TFRecordReader, columns: list[Column]) -> None:
    """Refuses shards if no sampled record has the declared dtype and shape; a single such record is just bad."""
    numeric = [column for column in columns if column.dtype != tf.string]
    sizes = []
    for index in np.unique(np.linspace(0, max(len(reader) - 1, 0), num=8, dtype=np.int64))[: len(reader)]:
        try:
            example = tf.train.Example.FromString(reader.read(np.array([index]))[0])  # no TensorFlow operation
            feature = example.features.feature
            sizes.append({column.name: len(feature[column.name].bytes_list.value[0]) for column in numeric})
        except (OSError, ValueError, IndexError, message.DecodeError):
            continue  # reading the example reports it by name
    for column in numeric:
        if sizes and all(size[column.name] != column.bytes for size in sizes):
            raise ConfigError(
                f"--dataset={name}: {SIDECAR} says that {column}, but the records have {sizes[0][column.name]}: "
                f"another dtype or shape. Write the shards again, or restore the {SIDECAR} that belongs to them."
            )


def _held_out_part(reader: records.TFRecordReader, fraction: float, training: bool) -> records.TFRecordReader:
    boundary = len(reader) - round(len(reader) * fraction)
    selected = range(boundary) if training else range(boundary, len(reader))
    slices, first = [], 0
    for path, count in zip(reader.paths, reader.records_per_file, strict=True):
        start, stop = max(first, selected.start), min(first + count, selected.stop)
        if start < stop:
            slices.append(records.FileSlice(path, start - first, stop - start))
        first += count
    return records.TFRecordReader(slices)


def _raw(value: Any) -> list[bytes]:
    """Returns the bytes of numbers in little-endian order as one string, or those of every text."""
    if isinstance(value, bytes):
        return [value]
    value = np.asarray(value)
    if value.dtype == object:
        return list(value.flat)
    return [value.astype(value.dtype.newbyteorder("<")).tobytes()]
