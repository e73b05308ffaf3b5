"""`tfds:NAME`: any TensorFlow Datasets data set that is prepared on disk, with random access.

Names, splits and features are TFDS' own; records are read by index from the shard files
(`tfpar.inputs.records`) and decoded by TFDS' feature decoders, in the graph. This module never
downloads anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import memory, records, source
from tfpar.inputs.source import Source, SourceInfo
from tfpar.inputs.sources import images, text
from tfpar.process.suggestions import did_you_mean

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core import read_only_builder

_SPEC = re.compile(r"(?P<name>[\w/.\-]+)(:(?P<version>\d+\.[\d*]+\.[\d*]+))?(:(?P<split>[A-Za-z_].*))?")
_TEXT_BYTES = 1 << 30
_READ_AT_ONCE = 256


def data_dir(config: InputConfig) -> str:
    """Returns `--data_dir`, or TFDS' default directory."""
    return os.path.expanduser(config.data_dir or str(tfds.core.constants.DATA_DIR))


def build(argument: str, config: InputConfig, split: str, seed: int) -> Source:
    """`--dataset=tfds:NAME[/CONFIG][:VERSION][:TRAIN_SPLIT[,VALIDATION_SPLIT]]`.

    Splits use the notation of TFDS (`train[:80%]`). The default training split is `train`. The
    default validation split is `validation`, or else `test`; if the data set has neither, it is the
    last `--validation_fraction` of the training split, which is then left out of training.

    Args:
      argument: The text after `tfds:`.
      config: The input options.
      split: `"train"` or `"validation"`.
      seed: Not used; splits do not depend on it.

    Raises:
      ConfigError: The data set is not prepared in `--data_dir`, a split does not exist, or the
        features are not supported.
    """
    match = _SPEC.fullmatch(argument)
    if not match:
        raise ConfigError(
            f"--dataset='tfds:{argument}' is not tfds:NAME[/CONFIG][:VERSION][:TRAIN_SPLIT[,VALIDATION_SPLIT]]. "
            "Write e.g. --dataset=tfds:mnist or --dataset='tfds:mnist:train[:90%],train[90%:]'."
        )
    name = match["name"] + (f":{match['version']}" if match["version"] else "")
    directory = data_dir(config)
    try:
        builder = read_only_builder.builder_from_files(name, data_dir=directory)
    except tfds.core.registered.DatasetNotFoundError as error:
        raise ConfigError(_not_prepared(name, directory)) from error
    part = _choose_split(argument, builder, match["split"], config, split)
    return from_builder(f"tfds:{argument}", builder, part, config, split)


def from_builder(name: str, builder: tfds.core.DatasetBuilder, part: str, config: InputConfig, split: str) -> Source:
    """Returns a source over one split of a prepared builder.

    Args:
      name: The source in the notation of `--dataset`.
      builder: The builder; its files are on disk.
      part: A split in TFDS' notation.
      config: The input options.
      split: `"train"` or `"validation"`, for the description.

    Raises:
      ConfigError: The features are not supported.
    """
    input_key, label_key = _supervised_keys(name, builder.info)
    feature = builder.info.features[input_key]
    if isinstance(feature, tfds.features.Text):
        return _text_source(name, builder, part, input_key, config, split)
    if label_key is None:
        raise ConfigError(
            f"--dataset={name} has no label to train on: its supervised keys are "
            f"{builder.info.supervised_keys}. Choose a data set with a label."
        )
    label = builder.info.features[label_key]
    if not isinstance(label, tfds.features.ClassLabel) or not label.num_classes:
        raise ConfigError(
            f"--dataset={name}: label feature {label_key!r} is {type(label).__name__}, not ClassLabel; only "
            "classification with one label per example is supported."
        )
    instructions = builder.info.splits[part].file_instructions
    reader = _record_reader(builder, instructions)
    features = tfds.decode.PartialDecoding({input_key: True, label_key: True}).extract_features(builder.info.features)
    shape, dtype, scale, to_shape = _input_format(feature, config)

    def decode(record: tf.Tensor) -> source.Batch:
        example = features.deserialize_example(record)
        return to_shape(example[input_key]), tf.cast(example[label_key], tf.int32)

    def read(indices: tf.Tensor) -> source.Batch:
        serialised = records.read_records(reader, indices)
        signature = (tf.TensorSpec(shape, dtype), tf.TensorSpec([], tf.int32))
        return tf.map_fn(decode, serialised, fn_output_signature=signature, parallel_iterations=16)

    info = SourceInfo(
        name=name,
        task=source.CLASSIFICATION,
        split=split,
        num_examples=sum(part.take for part in instructions),
        input_spec=tf.TensorSpec(shape, tf.float32),
        label_spec=tf.TensorSpec([], tf.int32),
        num_classes=label.num_classes,
        class_names=tuple(label.names),
        files=tuple(str(part.filename) for part in instructions),
        records_per_file=tuple(part.take for part in instructions),
    )
    stored = Source(info=info, read=read, scale=scale, portable=False, skip=config.on_bad_record == "skip")
    return memory.apply_cache(stored, config.cache, dtype.size * shape.num_elements() + tf.int32.size)


def _not_prepared(name: str, directory: str) -> str:
    present = sorted(
        entry.name
        for entry in (os.scandir(directory) if os.path.isdir(directory) else ())
        if entry.is_dir() and not entry.name.startswith(".") and entry.name != "downloads"
    )
    hint = did_you_mean(name.partition(":")[0].partition("/")[0], present, "tfds:{}".format, most=3)
    return (
        f"--dataset=tfds:{name} is not prepared in --data_dir={directory!r} (which contains: "
        f"{', '.join(present) or 'nothing'}).{hint} tfpar downloads nothing; prepare it once with: tfds build {name} "
        f"--data_dir={directory}"
    )


def _choose_split(
    argument: str, builder: tfds.core.DatasetBuilder, splits: str | None, config: InputConfig, split: str
) -> str:
    names = [name.strip() for name in splits.split(",")] if splits else []
    available = list(builder.info.splits)
    if len(names) == 2:
        chosen = names[0] if split == "train" else names[1]
    elif len(names) > 2:
        raise ConfigError(
            f"--dataset='tfds:{argument}' names {len(names)} splits; give one for training and one for validation."
        )
    else:
        train = names[0] if names else "train"
        separate = next((name for name in ("validation", "test") if name in available and name != train), None)
        chosen = train if split == "train" else separate or ""
        if separate is None:
            if train not in available:
                raise ConfigError(
                    f"--dataset='tfds:{argument}' has no validation split (it has {', '.join(available)}): name one, "
                    f"e.g. --dataset='tfds:{argument},SPLIT'."
                )
            count = builder.info.splits[train].num_examples
            boundary = count - round(count * config.validation_fraction)
            chosen = f"{train}[:{boundary}]" if split == "train" else f"{train}[{boundary}:]"
    try:
        builder.info.splits[chosen]
    except (KeyError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"--dataset='tfds:{argument}': split {chosen!r} does not exist. The splits are: {', '.join(available)}; "
            "write a part of a split as in train[:90%]."
        ) from error
    return chosen


def _supervised_keys(name: str, info: tfds.core.DatasetInfo) -> tuple[str, str | None]:
    """Returns the names of the input and label features; None as the label of text."""
    keys = info.supervised_keys
    if keys and len(keys) == 2 and all(isinstance(key, str) for key in keys):
        return keys
    available = list(info.features) if isinstance(info.features, tfds.features.FeaturesDict) else []
    if "image" in available and "label" in available:
        return "image", "label"
    if "text" in available:
        return "text", None
    raise ConfigError(
        f"--dataset={name}: cannot tell the input and the label. Its features are "
        f"{', '.join(available) or info.features}, its supervised keys {keys}; supported are supervised pairs, "
        "the features 'image' and 'label', and the feature 'text'."
    )


def _record_reader(builder: tfds.core.DatasetBuilder, instructions: list[Any]) -> records.RecordReader:
    file_format = str(builder.info.file_format.value)
    if file_format == "array_record":
        return records.ArrayRecordReader(instructions)
    if file_format == "tfrecord":
        return records.TFRecordReader(
            [records.FileSlice(str(part.filename), part.skip, part.take) for part in instructions]
        )
    raise ConfigError(
        f"TFDS data set {builder.info.full_name!r} is stored as {file_format}, which has no random access here. "
        f"Prepare it with: tfds build {builder.name} --file_format=array_record"
    )


def _input_format(
    feature: Any, config: InputConfig
) -> tuple[tf.TensorShape, tf.DType, float, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns the stored shape, the stored dtype, the scale, and the op that brings a decoded example to that shape."""
    shape, dtype = tf.TensorShape(feature.shape), tf.as_dtype(feature.tf_dtype)
    if isinstance(feature, tfds.features.Image) and not shape.is_fully_defined():
        height, width = config.image_shape()
        channels = shape[-1] or 3
        return (
            tf.TensorShape([height, width, channels]),
            tf.uint8,
            1 / 255,
            lambda image: images.fit(tf.ensure_shape(image, [None, None, channels]), height, width, config.crop),
        )
    if not shape.is_fully_defined():
        raise ConfigError(f"An input feature of shape {shape} is not supported: every dimension must be fixed.")
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise ConfigError(f"An input feature of dtype {dtype.name} is not supported: it must be numeric.")
    pixels = dtype in (tf.uint8, tf.uint16) and (isinstance(feature, tfds.features.Image) or shape.rank == 3)
    return shape, dtype, 1 / dtype.max if pixels else 1.0, lambda value: tf.ensure_shape(value, shape)


def _text_source(
    name: str, builder: tfds.core.DatasetBuilder, part: str, key: str, config: InputConfig, split: str
) -> Source:
    """Returns byte-level windows over all texts of a split, kept in memory."""
    instructions = builder.info.splits[part].file_instructions
    size = _estimated_bytes(builder, instructions)
    if size > _TEXT_BYTES:
        base = re.split(r"\W", part)[0]
        raise ConfigError(
            f"--dataset={name}: {part} has about {size / 2**30:.1f} GiB of text, but 1 GiB can be kept in memory. Name "
            f"smaller parts for training and validation, e.g. --dataset='tfds:NAME:{base}[:5%],{base}[5%:6%]'."
        )
    reader = _record_reader(builder, instructions)
    count = sum(part.take for part in instructions)
    documents: list[tuple[str, bytes]] = []
    for first in range(0, count, _READ_AT_ONCE):
        for record in reader.read(np.arange(first, min(first + _READ_AT_ONCE, count))):
            # Parsed with protobuf, because TFDS' decoders are TensorFlow operations.
            content = tf.train.Example.FromString(record).features.feature[key].bytes_list.value[0]
            documents.append((str(len(documents)), content))
    return text.windows(name, documents, config.sequence_length, split, named_files=False)


def _estimated_bytes(builder: tfds.core.DatasetBuilder, instructions: list[Any]) -> float:
    """Returns the size of the examples to read, of which TFDS knows the size of whole splits alone (4.9.10)."""
    bytes_per_example = {
        str(whole.filename): split.num_bytes / split.num_examples
        for split in builder.info.splits.values()
        if split.num_examples
        for whole in split.file_instructions
    }
    return sum(part.take * bytes_per_example[str(part.filename)] for part in instructions)
