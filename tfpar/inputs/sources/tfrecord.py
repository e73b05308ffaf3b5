"""`tfrecord:GLOB`: TFRecord shards with a `features.json` in the same directory, with random access.

`python -m tfpar.inputs.write` creates both from any source. Each record is a `tf.train.Example`
whose features `x` and `y` hold the raw little-endian bytes of the example as its source stores
it, so that three ops parse a whole batch. `features.json` describes how to read the records.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import memory, records, source
from tfpar.inputs.source import Source, SourceInfo

import numpy as np
import tensorflow as tf
from google.protobuf import message  # type: ignore[import-untyped]

SIDECAR = "features.json"
FORMAT = "tfpar-tfrecord-1"
SPLITS = ("train", "validation")
_TEXT_CODES = {"bytes": source.decode_bytes}


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
      stored_label_dtype: Dtype of `y` in the records; `Source.fetch` returns int32.
      scale: Factor from stored to fetched inputs.
      num_classes: Labels lie in `[0, num_classes)`.
      class_names: Names in label order, or empty.
      text: How tokens are decoded to text: `"bytes"`, or empty if they are not text.
      records: Number of records by file name.
      format: Version of this format.
    """

    name: str
    task: str
    input_shape: list[int]
    input_dtype: str
    stored_input_dtype: str
    label_shape: list[int]
    stored_label_dtype: str
    scale: float
    num_classes: int
    class_names: list[str]
    text: str
    records: dict[str, int]
    format: str = FORMAT


@dataclasses.dataclass(frozen=True)
class Column:
    """One feature of the records: the raw bytes of an array.

    Attributes:
      name: `"x"` or `"y"`.
      dtype: The stored dtype.
      shape: Shape of one example.
    """

    name: str
    dtype: tf.DType
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of one example, in bytes."""
        return self.dtype.size * int(np.prod(self.shape))

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype.name} {list(self.shape)}, takes {self.bytes} bytes"

    def decode(self, raw: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
        """Decodes string [n] to an array [n, ...]; `indices` [n] gives the static length."""
        lengths = tf.strings.length(raw)
        fits = tf.debugging.Assert(tf.reduce_all(lengths == self.bytes), [f"{self}, but the record has another size"])
        with tf.control_dependencies([fits] if fits is not None else []):
            raw = tf.identity(raw)
        rows = indices.shape[0] if indices.shape[0] is not None else -1
        return tf.reshape(tf.io.decode_raw(raw, self.dtype), [rows, *self.shape])


def describe(examples: Source, stored: source.Batch, counts: dict[str, int]) -> Features:
    """Returns the `Features` of a source.

    Args:
      examples: The source.
      stored: Any batch of its `read`, for the stored dtypes.
      counts: Number of records by file name.
    """
    info = examples.info
    return Features(
        name=info.name,
        task=info.task,
        input_shape=info.input_spec.shape.as_list(),
        input_dtype=info.input_spec.dtype.name,
        stored_input_dtype=stored[0].dtype.name,
        label_shape=info.label_spec.shape.as_list(),
        stored_label_dtype=stored[1].dtype.name,
        scale=examples.scale,
        num_classes=info.num_classes,
        class_names=list(info.class_names),
        text=next((name for name, decode in _TEXT_CODES.items() if info.decode is decode), ""),
        records=counts,
    )


def serialise(x: np.ndarray, y: np.ndarray) -> bytes:
    """Serialises the stored values of one example as a `tf.train.Example`."""
    feature = {
        key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[_little_endian(value).tobytes()]))
        for key, value in (("x", x), ("y", y))
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def build(argument: str, config: InputConfig, split: str, seed: int) -> Source:
    """`--dataset=tfrecord:GLOB`, a pattern or a directory of `.tfrecord` files.

    Files whose names start with `train` or `validation` belong to that split. If the pattern matches
    no such names, the last `--validation_fraction` of all records is held out.

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
    if any(named.values()):
        reader = _reader(named[split], features)
    else:
        reader = _held_out_part(_reader(paths, features), config.validation_fraction, split == "train")
    info = SourceInfo(
        name=name,
        task=features.task,
        split=split,
        num_examples=len(reader),
        input_spec=tf.TensorSpec(features.input_shape, features.input_dtype),
        label_spec=tf.TensorSpec(features.label_shape, tf.int32),
        num_classes=features.num_classes,
        class_names=tuple(features.class_names),
        files=tuple(reader.paths),
        records_per_file=reader.records_per_file,
        decode=_TEXT_CODES.get(features.text),
    )
    columns = {
        "x": Column("x", tf.as_dtype(features.stored_input_dtype), tuple(features.input_shape)),
        "y": Column("y", tf.as_dtype(features.stored_label_dtype), tuple(features.label_shape)),
    }
    _check_sample(name, reader, columns)

    def read(indices: tf.Tensor) -> source.Batch:
        serialised = records.read_records(reader, indices)
        raw = tf.io.parse_example(serialised, {key: tf.io.FixedLenFeature([], tf.string) for key in columns})
        x, y = (column.decode(raw[key], indices) for key, column in columns.items())
        return x, y

    skip = config.on_bad_record == "skip"
    stored = Source(info=info, read=read, scale=features.scale, portable=False, skip=skip)
    return memory.apply_cache(stored, config.cache, sum(column.bytes for column in columns.values()))


def _shards(name: str, argument: str) -> list[str]:
    pattern = os.path.expanduser(argument)
    if tf.io.gfile.isdir(pattern):
        pattern = os.path.join(pattern, "*.tfrecord")
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
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')!r}, not {FORMAT!r}")
        features = Features(**content)
        for dtype in (features.input_dtype, features.stored_input_dtype, features.stored_label_dtype):
            if not (tf.as_dtype(dtype).is_floating or tf.as_dtype(dtype).is_integer or tf.as_dtype(dtype).is_bool):
                raise ValueError(f"its dtype {dtype!r} is not numeric")
        return features
    except (OSError, tf.errors.OpError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--dataset={name} needs {path!r}, which describes the records: {error}. "
            "python -m tfpar.inputs.write creates it in the directory of the shards."
        ) from error


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


def _check_sample(name: str, reader: records.TFRecordReader, columns: dict[str, Column]) -> None:
    """Refuses records of another dtype or shape than declared, if all sampled ones are; a single one is just bad."""
    sizes = []
    for index in np.unique(np.linspace(0, max(len(reader) - 1, 0), num=8, dtype=np.int64))[: len(reader)]:
        try:
            example = tf.train.Example.FromString(reader.read(np.array([index]))[0])  # no TensorFlow operation
            sizes.append({key: len(example.features.feature[key].bytes_list.value[0]) for key in columns})
        except (OSError, ValueError, IndexError, message.DecodeError):
            continue  # reading the example reports it by name
    for key, column in columns.items():
        if sizes and all(size[key] != column.bytes for size in sizes):
            raise ConfigError(
                f"--dataset={name}: {SIDECAR} says that {column}, but the records have {sizes[0][key]}: another dtype "
                f"or shape. Write the shards again, or restore the {SIDECAR} that belongs to them."
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


def _little_endian(value: np.ndarray) -> np.ndarray:
    value = np.asarray(value)
    return value.astype(value.dtype.newbyteorder("<"))
