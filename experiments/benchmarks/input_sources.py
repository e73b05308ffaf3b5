"""The same digits, and the same text, through each way into the input pipeline. `inputs.py` measures them."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator

from tfpar import inputs, models
from tfpar.checkpoint.model_files import task_spec
from tfpar.config import InputConfig
from tfpar.inputs.write import write

import keras
import numpy as np
import pyarrow  # type: ignore[import-untyped]
import tensorflow as tf
from array_record.python import (  # type: ignore[import-untyped]
    array_record_data_source,
    array_record_module,
)
from PIL import Image
from pyarrow import csv, parquet

DIGITS_BATCH = 64
TEXT_BATCH = 8
_SHAPE = (8, 8, 1)
_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Workload:
    """One way in.

    Attributes:
      name: What a row of the table says.
      source: Builds the source, from files that it writes into a directory.
      model: Builds the model for the source.
      batch: Examples per step.
    """

    name: str
    source: Callable[[pathlib.Path], inputs.AnySource]
    model: Callable[[inputs.AnySource], keras.Model]
    batch: int


class _Batches(keras.utils.PyDataset):
    """Batches of arrays."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        super().__init__()
        self._x, self._y = x, y

    def __len__(self) -> int:
        return -(-len(self._x) // DIGITS_BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(DIGITS_BATCH * index, DIGITS_BATCH * (index + 1))
        return self._x[rows], self._y[rows]


class _Loader:
    """The same batches in order, one by one, as a data loader of another library gives them."""

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        batches = _Batches(*_digits())
        return (batches[number] for number in range(len(batches)))


def workloads() -> list[Workload]:
    """Returns a workload for each way in."""
    digits: dict[str, Callable[[pathlib.Path], inputs.AnySource]] = {
        "--dataset=digits": lambda folder: inputs.load("digits"),
        "arrays": lambda folder: inputs.from_arrays(*_digits()),
        "a list of tuples": lambda folder: inputs.as_source(list(zip(*_digits(), strict=True))),
        "tf.data": lambda folder: inputs.as_source(
            tf.data.Dataset.from_tensor_slices(_digits()).shuffle(1437).batch(DIGITS_BATCH)
        ),
        "PyDataset": lambda folder: inputs.from_random_access(_Batches(*_digits())),
        "a data loader": lambda folder: inputs.from_iterable(_Loader()),
        "ArrayRecord": _array_record,
        "TFRecord, not cached": _tfrecord,
        "CSV": functools.partial(_table, "csv"),
        "Parquet": functools.partial(_table, "parquet"),
        "WebP files, not cached": _webp,
    }
    text: dict[str, Callable[[pathlib.Path], inputs.AnySource]] = {
        "--dataset=text": lambda folder: inputs.load("text"),
        "tokens": _tokens,
    }
    return [
        *(Workload(f"digits: {name}", make, _convnet, DIGITS_BATCH) for name, make in digits.items()),
        *(Workload(f"text: {name}", make, _language_model, TEXT_BATCH) for name, make in text.items()),
    ]


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    source = inputs.load("digits")
    x, y = source.fetch(np.arange(source.info.num_examples))
    return x.numpy(), y.numpy()


def _array_record(folder: pathlib.Path) -> inputs.AnySource:
    path = str(folder / "digits.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for x, y in zip(*_digits(), strict=True):
        writer.write(np.append(x.ravel(), np.float32(y)).tobytes())
    writer.close()

    def parse(record: bytes) -> tuple[np.ndarray, int]:
        values = np.frombuffer(record, np.float32)
        return values[:-1].reshape(_SHAPE), int(values[-1])

    data = array_record_data_source.ArrayRecordDataSource(path)
    return inputs.from_random_access(data, transform=parse)


def _tfrecord(folder: pathlib.Path) -> inputs.AnySource:
    write(InputConfig(dataset="digits"), str(folder / "shards"), shards=4)
    return inputs.load(f"tfrecord:{folder}/shards", cache="none")


def _table(kind: str, folder: pathlib.Path) -> inputs.AnySource:
    x, y = _digits()
    columns = {f"pixel{number}": values for number, values in enumerate(x.reshape(len(x), -1).T)}
    table = pyarrow.table({**columns, "digit": y})
    path = folder / f"digits.{kind}"
    if kind == "csv":
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path)
    return inputs.load(f"{kind}:{path}?label=digit&as=vector")


def _webp(folder: pathlib.Path) -> inputs.AnySource:
    for number, (x, y) in enumerate(zip(*_digits(), strict=True)):
        path = folder / str(y) / f"{number}.webp"
        path.parent.mkdir(exist_ok=True)
        pixels = np.rint(x * 255).astype(np.uint8)
        Image.fromarray(pixels.repeat(3, axis=2)).save(path, lossless=True)
    return inputs.load(f"images:{folder}", image_size=_SHAPE[0], cache="none")


def _tokens(folder: pathlib.Path) -> inputs.AnySource:
    documents = [inputs.load("text").info.files[number] for number in range(20)]
    texts = [pathlib.Path(path).read_text(errors="replace") for path in documents]
    return inputs.from_text(texts, lambda text: list(text.encode()), packing="fit", vocabulary_size=256)


def _convnet(source: inputs.AnySource) -> keras.Model:
    shape = tuple(source.info.input_spec.shape)
    image = shape if len(shape) == len(_SHAPE) else _SHAPE
    model = models.build(
        "convnet",
        models.TaskSpec(task=inputs.CLASSIFICATION, input_shape=image, input_dtype="float32", num_classes=_CLASSES),
    )
    if image == shape:
        return model
    return keras.Sequential([keras.Input(shape), keras.layers.Reshape(image), model])


def _language_model(source: inputs.AnySource) -> keras.Model:
    return models.build("transformer_lm_tiny", task_spec(source))
