"""Examples of any object with `__len__` and `__getitem__`, read in parallel threads in the order of the pipeline.

Such objects are lists, TFDS' `data_source`, ArrayRecord and Grain sources, PyTorch map-style data sets, and
`keras.utils.PyDataset`, whose items are batches. Their own samplers and their shuffling are not used: the order is that
of `tfpar.inputs.epoch_order`, so a run resumes at any step.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tfpar.config import ConfigError, unknown_name
from tfpar.inputs import memory, structures
from tfpar.inputs.source import CLASSIFICATION, Batch, Read, Source, SourceInfo
from tfpar.inputs.sources.columns import items as item_layout
from tfpar.inputs.structures import Structure

import keras
import numpy as np
import tensorflow as tf

# Passing items to a thread takes about this long; the requesting thread itself reads items that are faster.
_SECONDS_PER_CHUNK = 2e-3
# Number of batches of a `PyDataset` that are cached: the replicas of a worker read parts of the same batch.
_KEPT_BATCHES = 8


class RandomAccess(Protocol):
    """Anything that can be read by index. `__getitems__`, if there is one, reads several at once."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


def from_random_access(
    data: RandomAccess,
    *,
    inputs: str | Sequence[str] | None = None,
    labels: str | Sequence[str] | None = None,
    sample_weight: str | None = None,
    transform: Callable[[Any], Any] | None = None,
    batched: bool | None = None,
    num_classes: int | None = None,
    ignore_class: int | None = None,
    scale: Structure = 1.0,
    threads: int = 16,
    cache: str = "none",
    split: str = "train",
    name: str = "",
    on_bad_record: str = "fail",
) -> Source:
    """Returns a source over an object that is read by index.

    An item is `x`, `(x, y)` or `(x, y, sample_weight)`, each an array or a structure of arrays. All items have the
    shapes and kinds of the first one. The model receives the dtypes that `from_arrays` describes, but int64 inputs for
    all integers that NumPy holds in more bits than int32, such as Python's: later items may be larger than the first.

    Args:
      data: The object. TFDS' `data_source` needs no further arguments if its data set has supervised keys.
      inputs: For items that are dicts: the key of the inputs, or several keys for a dict of inputs.
      labels: For items that are dicts: the key of the label, or several keys for a dict of labels.
      sample_weight: For items that are dicts: the key of the sample weights.
      transform: Applied to each item first, in several threads, e.g. to parse the bytes of a record.
      batched: Whether an item is a batch `[b, ...]`; by default only those of a `keras.utils.PyDataset` are. All items
        but the last have one size. Whole items are shuffled; a last, smaller one stays last. Give `global_batch_size`
        the same size, so that a step reads one item.
      num_classes: Number of classes; by default that of the data set, or 0 if unknown: labels are then not checked.
      ignore_class: A label outside `[0, num_classes)` that the loss ignores.
      scale: Factor for the floating-point inputs, e.g. 1/255 for images; or a structure like the inputs.
      threads: Largest number of threads that read items at once; 1 for objects that are not thread-safe.
      cache: `"none"` reads items in every epoch; `"memory"` reads each once and keeps it.
      split: `"train"` or `"validation"`, for reports.
      name: For reports and errors; by default the type of the object.
      on_bad_record: For items that cannot be read, differ in shape or are not finite: `"fail"`, or `"skip"`.

    Returns:
      A source of `len(data)` examples; with batches, of as many as they hold.

    Raises:
      ConfigError: The object is empty or cannot be read by index, its first item has no such key or is not made of
        numbers and text, or an argument is out of range.
    """
    features = _DatasetInfo(getattr(data, "dataset_info", None))
    if inputs is None and labels is None and transform is None:
        inputs, labels = features.keys
    _check_options(name := name or type(data).__name__, on_bad_record=on_bad_record, cache=cache, threads=threads)
    split_item = item_layout.splitter(name, inputs, labels, sample_weight, transform)
    classes = features.num_classes(labels) if num_classes is None else num_classes
    described = {"name": name, "split": split, "num_classes": classes, "ignore_class": ignore_class}
    info, read, size = _open(data, split_item, threads, batched, described)
    scale = structures.without_lists(scale)
    source = Source(info=info, read=read, scale=scale, portable=False, skip=on_bad_record == "skip")
    return memory.keep_in_memory(source, size) if cache == "memory" else source


def _open(
    data: RandomAccess,
    split_item: item_layout.SplitItem,
    threads: int,
    batched: bool | None,
    described: dict[str, Any],
) -> tuple[SourceInfo, Read, int]:
    """Returns the description, the `read` and the bytes per example of a source, from its first and last items."""
    name = described["name"]
    batched = isinstance(data, keras.utils.PyDataset) if batched is None else batched
    count = _length(name, data)
    layout = _first(name, data, split_item, batched)
    reader = _Reader(data, split_item, layout, threads)
    info = SourceInfo(
        **described,
        task=CLASSIFICATION,
        num_examples=(count - 1) * layout.rows + _rows_of_last(name, reader, count) if batched else count,
        input_spec=layout.input_spec,
        label_spec=layout.label_spec,
        weight_spec=layout.weight_spec,
        block_size=layout.rows,
    )
    return info, _reads(info, layout, reader.read_batched if batched else reader.read), layout.bytes_per_example


def _reads(info: SourceInfo, layout: item_layout.Layout, read_rows: Callable[[np.ndarray], list[np.ndarray]]) -> Read:
    """Returns the `read` of a source, in TensorFlow operations."""
    stored = [tf.string if dtype.hasobject else tf.as_dtype(dtype) for dtype in layout.dtypes]

    def read(indices: tf.Tensor) -> Batch:
        leaves = tf.numpy_function(read_rows, [indices], stored, stateful=False)
        # One output comes without a list around it.
        packed = tf.nest.pack_sequence_as((info.input_spec, info.target_spec), tf.nest.flatten(leaves))
        x, y = (
            structures.ensure_rows(part, indices, specs)
            for part, specs in zip(packed, (info.input_spec, info.target_spec), strict=True)
        )
        return x, y

    return read


def _check_options(name: str, *, on_bad_record: str, cache: str, threads: int) -> None:
    if on_bad_record not in ("fail", "skip"):
        raise unknown_name("on_bad_record", on_bad_record, ("fail", "skip"))
    if cache not in ("none", "memory"):
        raise unknown_name("cache", cache, ("none", "memory"))
    if threads < 1:
        raise ConfigError(f"{name}: threads={threads} must be at least 1.")


class _Reader:
    """Reads examples by index as flat arrays; safe to call from several threads."""

    def __init__(self, data: RandomAccess, split_item: item_layout.SplitItem, layout: item_layout.Layout, threads: int):
        self._data = data
        self._split_item = split_item
        self._layout = layout
        self._threads = threads
        self._permits = threading.BoundedSemaphore(threads)  # tf.data's threads read, too, not only those of the pool
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._seconds_per_item = 0.0
        self._lock = threading.Lock()
        self._batches: collections.OrderedDict[int, concurrent.futures.Future] = collections.OrderedDict()

    def read(self, indices: np.ndarray) -> list[np.ndarray]:
        """int64 [n] -> the leaves of the examples, [n, ...] each, as stored."""
        numbers = indices.tolist()
        # `__getitems__` parallelises itself if worthwhile: that of ArrayRecord takes three times as long if split up.
        together = hasattr(self._data, "__getitems__")
        wanted = 1 if together else int(self._seconds_per_item * len(numbers) / _SECONDS_PER_CHUNK) + 1
        chunks = min(self._threads, wanted)
        if chunks == 1:
            items = self._items(numbers)
        else:
            bounds = [part * len(numbers) // chunks for part in range(chunks + 1)]
            parts = [numbers[low:high] for low, high in itertools.pairwise(bounds)]
            items = [item for part in self._executor().map(self._items, parts) for item in part]
        return self._layout.join(items, numbers)

    def read_batched(self, indices: np.ndarray) -> list[np.ndarray]:
        """The same for items that are batches of examples."""
        numbers, rows = np.divmod(indices, self._layout.rows)
        columns = [np.empty((len(indices), *shape), dtype) for shape, dtype in self._layout.leaves]
        for number in np.unique(numbers).tolist():
            chosen = np.flatnonzero(numbers == number)
            for column, values in zip(columns, self.batch(number), strict=True):
                if rows[chosen].max() >= len(values):
                    raise item_layout.ItemError(
                        f"its batch, item {number}, has {len(values)} rows, but {self._layout.rows} are expected"
                    )
                column[chosen] = values[rows[chosen]]
        return columns

    def batch(self, number: int) -> list[np.ndarray]:
        """Returns the leaves of one item that is a batch, [b, ...] each; the last few are kept."""
        with self._lock:
            future = self._batches.get(number)
            mine = future is None
            if future is None:
                future = self._batches[number] = concurrent.futures.Future()
                while len(self._batches) > _KEPT_BATCHES:
                    self._batches.popitem(last=False)
            else:
                self._batches.move_to_end(number)
        if mine:
            try:
                future.set_result(self._layout.join_batch(self._items([number])[0], number))
            except Exception as error:
                with self._lock:
                    self._batches.pop(number, None)
                future.set_exception(error)
        return future.result()

    def _items(self, numbers: list[int]) -> list[Structure]:
        """Reads items one after the other; `(x, target)` each."""
        began = time.perf_counter()
        with self._permits:
            read_many = getattr(self._data, "__getitems__", None)
            if read_many is None or len(numbers) == 1:
                items = [self._item(number) for number in numbers]
            else:
                items = self._many(read_many, numbers)
        seconds = (time.perf_counter() - began) / max(len(numbers), 1)
        self._seconds_per_item += 0.1 * (seconds - self._seconds_per_item)
        return items

    def _item(self, number: int) -> Structure:
        try:
            return self._split_item(self._data[number])
        except Exception as error:
            raise item_layout.ItemError(f"item {number} raised {type(error).__name__}: {error}") from error

    def _many(self, read_many: Callable[[list[int]], Sequence[Any]], numbers: list[int]) -> list[Structure]:
        try:
            items = list(read_many(numbers))
        except Exception:  # one by one, the item that raises is named
            return [self._item(number) for number in numbers]
        if len(items) != len(numbers):
            raise item_layout.ItemError(f"__getitems__ returned {len(items)} items for {len(numbers)} indices")
        result = []
        for number, item in zip(numbers, items, strict=True):
            try:
                result.append(self._split_item(item))
            except Exception as error:
                raise item_layout.ItemError(f"item {number} raised {type(error).__name__}: {error}") from error
        return result

    def _executor(self) -> concurrent.futures.ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(self._threads, "tfpar-read")
            return self._pool


@dataclasses.dataclass(frozen=True)
class _DatasetInfo:
    """The description that a TFDS data source has; None for all other objects."""

    info: Any

    @property
    def keys(self) -> tuple[str | None, str | None]:
        """Returns the keys of inputs and labels."""
        keys = getattr(self.info, "supervised_keys", None)
        return keys if keys and len(keys) == 2 and all(isinstance(key, str) for key in keys) else (None, None)

    def num_classes(self, label: object) -> int:
        """Returns the number of classes of a label; 0 if unknown."""
        try:
            feature = self.info.features[label]
        except (AttributeError, KeyError, TypeError):
            return 0
        return int(getattr(feature, "num_classes", 0) or 0)


def _length(name: str, data: RandomAccess) -> int:
    """Returns the number of items; refuses objects that are empty or have no length."""
    try:
        count = data.num_batches if isinstance(data, keras.utils.PyDataset) else len(data)
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"{name} has no length ({error}). Random access needs __len__ and __getitem__; give a generator or another "
            "iterable as a tf.data.Dataset."
        ) from error
    if count is None:
        raise ConfigError(f"{name} is infinite (num_batches is None). Give it a length, or use a tf.data.Dataset.")
    if not count:
        raise ConfigError(f"{name} is empty: its length is 0. Give a data set with examples.")
    return int(count)


def _first(name: str, data: RandomAccess, split_item: item_layout.SplitItem, batched: bool) -> item_layout.Layout:
    try:
        item = data[0]
    except Exception as error:
        raise ConfigError(f"{name}: item 0 cannot be read: {type(error).__name__}: {error}") from error
    try:
        return item_layout.infer(split_item(item), batched)
    except item_layout.ItemError as error:
        raise ConfigError(f"{name}: {error}") from error


def _rows_of_last(name: str, reader: _Reader, count: int) -> int:
    try:
        return len(reader.batch(count - 1)[0])
    except item_layout.ItemError as error:
        raise ConfigError(f"{name}: {error}") from error
