"""A `tf.data.Dataset` as a source of examples."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from tfpar.config import ConfigError, TrainingError, unknown_name
from tfpar.inputs import structures
from tfpar.inputs.bad_records import error_text
from tfpar.inputs.source import CLASSIFICATION, STREAM, UNKNOWN, SourceInfo, Weighted, no_autograph
from tfpar.inputs.structures import Structure

import keras
import tensorflow as tf

SHARDINGS = ("example", "worker")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StreamSource:
    """Examples in the order in which a `tf.data.Dataset` gives them.

    The examples of a stream have no indices: it cannot jump to a step, it determines its own order, and errors cannot
    name an unusable example. `from_dataset` creates a stream.

    Attributes:
      make: Creates the dataset of one input pipeline.
      sharding: `"example"` or `"worker"`, see `from_dataset`.
      batched: Whether the elements of the dataset are batches; None: determined from their shapes.
      examples: Number of examples in one pass, of all workers; None if unknown.
      name: Name for reports and errors.
      split: `"train"` or `"validation"`, for reports.
      retarget: Maps the targets of a batch to others; None keeps them.
      first: Returns a digest of the first element, if reading it has no side effects, or None.
      digest: Digest of what `retarget` does; empty without it.
      beginning: Whether `examples` are the beginning of the stream, which may have more; for evaluations.
    """

    make: Callable[[tf.distribute.InputContext], tf.data.Dataset]
    sharding: str
    batched: bool | None = None
    examples: int | None = None
    name: str = "dataset"
    split: str = "train"
    retarget: Callable[[Structure], Structure] | None = None
    first: Callable[[], str] | None = None
    digest: str = ""
    beginning: bool = False

    @functools.cached_property
    def info(self) -> SourceInfo:
        """The description; `num_examples` is `UNKNOWN` until it has been counted."""
        x, targets = self._whole.element_spec
        y, weight = targets if isinstance(targets, Weighted) else (targets, ())
        one = structures.map_arrays(lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), (x, y, weight))
        return SourceInfo(
            name=self.name,
            task=CLASSIFICATION,
            split=self.split,
            num_examples=UNKNOWN if self.examples is None else self.examples,
            input_spec=one[0],
            label_spec=one[1],
            num_classes=0,
            weight_spec=one[2],
            storage=STREAM,
            digest=self.digest,
        )

    @functools.cached_property
    def endless(self) -> bool:
        """Whether the dataset does not end by itself where reading does: it repeats, or `examples` are a beginning."""
        return self.beginning or int(self._whole.cardinality()) == tf.data.INFINITE_CARDINALITY

    @functools.cached_property
    def _whole(self) -> tf.data.Dataset:
        """Returns the batches of the only worker, or of the first one."""
        return self.batches(tf.distribute.InputContext())

    def counted(self, *, told: bool = True, read: int = 0) -> StreamSource:
        """Returns the same stream with a known number of examples.

        If tf.data does not know the number, a pass counts them; with `read`, it ends after that many.

        Args:
          told: Whether to log this pass.
          read: Number of examples that are read. If the stream has no end, or the pass finds that many, it counts as
            one of `read` examples; 0: all.

        Raises:
          ConfigError: The stream is endless, or every worker has its own stream.
          TrainingError: It cannot be read.
        """
        if self.examples is not None:
            return self
        if self.endless and read:
            return dataclasses.replace(self, examples=read, beginning=True)
        if self.endless:
            raise ConfigError(
                f"{self.name}: the stream has no end, so there are no epochs in it. take(...) a part of it, or train "
                "with --steps (fit(steps=...)) and evaluate with --eval_steps (evaluate(steps=...))."
            )
        if self.sharding == "worker":
            raise ConfigError(
                f"{self.name}: every worker reads a stream of its own, so the total number of examples is not known. "
                "Give from_dataset(..., examples=N) for epochs, or --steps."
            )
        examples = self._known_examples()
        if examples is None:
            examples = self._counted_examples(told, read)
            if read and examples >= read:  # a generator without an end looks like any other
                return dataclasses.replace(self, examples=read, beginning=True)
        if not examples:
            raise ConfigError(f"{self.name}: {_EMPTY}")
        return dataclasses.replace(self, examples=examples)

    def _known_examples(self) -> int | None:
        """Returns the number of examples in one pass if tf.data knows it, else None."""
        dataset = self.make(tf.distribute.InputContext())
        rows = structures.first_leaf(dataset.element_spec).shape[0] if self._has_batches(dataset) else 1
        elements = int(dataset.cardinality())
        return None if rows is None or elements < 0 else elements * rows

    def _counted_examples(self, told: bool, read: int) -> int:
        """Counts the examples of a pass; with `read`, stops once there are that many."""
        if told:
            _log.info(
                "counting the examples of %s, in one pass (examples=N of tfpar.inputs.from_dataset saves that)",
                self.name,
            )

        def size(*batch: Structure) -> tf.Tensor:
            return tf.shape(structures.first_leaf(batch), tf.int64)[0]

        examples = 0
        try:
            for count in self._whole.map(no_autograph(size)):
                examples += int(count)
                if read and examples >= read:
                    break
        except tf.errors.ResourceExhaustedError:
            raise
        except tf.errors.OpError as error:
            raise stream_error(self, error) from error
        return examples

    def _has_batches(self, dataset: tf.data.Dataset) -> bool:
        return is_batched(dataset.element_spec) if self.batched is None else self.batched

    def batches(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """Returns the dataset of one input pipeline as `(x, targets)`, in batches of any size.

        Args:
          context: The index of the input pipeline, and their number.

        Returns:
          A dataset of x [n, ...] and targets [n, ...] (labels, `Weighted`, or `()`), with static trailing shapes.

        Raises:
          ConfigError: The elements have another form.
        """
        dataset = self.make(context)
        if not isinstance(dataset, tf.data.Dataset):
            what = type(dataset).__name__
            raise ConfigError(f"{self.name}: the function returned {what}, but must return a tf.data.Dataset.")
        _check_tensors(self.name, dataset.element_spec)
        if not self._has_batches(dataset):
            dataset = dataset.batch(_READ_AT_ONCE)
        _check_shapes(self.name, dataset.element_spec)
        floatx = tf.as_dtype(keras.config.floatx())

        def standard(*element: Structure) -> tuple[Structure, Structure]:
            x, y, weight = _unpack(self.name, element)
            targets = y if weight is None else Weighted(y, weight)

            def cast(values: tf.Tensor) -> tf.Tensor:
                return tf.cast(values, floatx) if values.dtype.is_floating else values

            return structures.map_arrays(cast, (structures.without_lists(x), structures.without_lists(targets)))

        dataset = dataset.map(no_autograph(standard))
        if self.retarget is None:
            return dataset
        retarget = self.retarget
        return dataset.map(no_autograph(lambda x, targets: (x, retarget(targets))))

    @functools.cached_property
    def own_batch(self) -> int | None:
        """Number of examples in the dataset's own batches, if it can be determined; else None."""
        dataset = self.make(tf.distribute.InputContext())
        if self.batched is False or not is_batched(dataset.element_spec):
            return None
        size = tf.nest.flatten(dataset.element_spec)[0].shape[0]
        while size is None and dataset is not None:
            size = tf.get_static_value(getattr(dataset, "_batch_size", None))
            dataset = getattr(dataset, "_input_dataset", None)
        return None if size is None else int(size)


_READ_AT_ONCE = 64
_EMPTY = (
    "the stream has no examples. Check what its filter(), skip() or take() leave, and that a generator starts again."
)


def from_dataset(
    dataset: tf.data.Dataset | Callable[[tf.distribute.InputContext], tf.data.Dataset],
    *,
    sharding: str | None = None,
    batched: bool | None = None,
    examples: int | None = None,
    split: str = "train",
    name: str = "dataset",
    first: Callable[[], str] | None = None,
) -> StreamSource:
    """Returns a source over a `tf.data.Dataset`; `Trainer.fit` calls this for a dataset.

    The dataset's own batches do not matter: its examples are batched again to `global_batch_size`. It is repeated for
    as many epochs as needed; only its own `shuffle` shuffles it. A run resumes where it stopped in the stream if
    tf.data can save its iterator (not with Python functions, or random numbers without a seed) and the number of
    workers is the same; otherwise the stream starts again, and the log says so. For a Python generator, use
    `Dataset.from_generator`.

    Args:
      dataset: A dataset of `(x, y)`, `(x, y, sample_weight)`, or `x` alone (tensors, tuples or dicts), or a function of
        a `tf.distribute.InputContext` that returns one.
      sharding: How workers share the examples. `"example"`, the default for a dataset: every worker reads the whole
        stream, which must be the same on all of them, and takes its rows of each batch; the numbers are those of one
        worker. `"worker"`, the default for a function: each worker's dataset is its own share, of which it takes
        `global_batch_size / workers` examples a step.
      batched: Whether elements are batches. By default they are, as for Keras, unless one of their tensors is a scalar.
      examples: Number of examples in one pass, of all workers, if tf.data does not know it; if None, an extra pass
        counts them when epochs or an evaluation need the number.
      split: `"train"` or `"validation"`, for reports.
      name: Name for reports and errors.
      first: Returns a digest of the first element, with which workers check that they read the same data.

    Raises:
      ConfigError: `dataset` is neither a dataset nor a function, or the sharding is unknown.
    """
    if isinstance(dataset, tf.data.Dataset):
        given = dataset
        make: Callable[..., Any] = lambda context: given  # noqa: E731
    elif callable(dataset):
        make = dataset
    else:
        raise ConfigError(
            f"from_dataset: expected a tf.data.Dataset or a function of a tf.distribute.InputContext, got {dataset!r}."
        )
    if sharding is None:
        sharding = "example" if isinstance(dataset, tf.data.Dataset) else "worker"
    if sharding not in SHARDINGS:
        raise unknown_name("sharding", sharding, SHARDINGS)
    if examples is not None and examples < 1:
        raise ConfigError(f"from_dataset(examples={examples}): give the number of examples in one pass, at least 1.")
    return StreamSource(
        make=make,
        sharding=sharding,
        batched=batched,
        examples=examples,
        split=split,
        name=name,
        first=first,
    )


def _unpack(name: str, element: tuple[Structure, ...]) -> tuple[Structure, Structure, Structure | None]:
    """Returns x, y (`()` without labels) and sample weights (None without) of an element, as Keras interprets it."""
    if len(element) == 1:
        return element[0], (), None
    if len(element) == 2:
        return element[0], element[1], None
    if len(element) == 3:
        return element[0], element[1], element[2]
    raise ConfigError(
        f"{name}: elements have {len(element)} parts, but must be x, (x, y) or (x, y, sample_weight). Put several "
        "inputs in a tuple or dict of their own: ((a, b), y)."
    )


def _check_tensors(name: str, specs: Structure) -> None:
    for path, spec in structures.named_leaves(specs):
        if not isinstance(spec, tf.TensorSpec):
            kind = type(spec).__name__.removesuffix("Spec")
            raise ConfigError(
                f"{name}: the element's part {path or 'x'} is a {kind}, but must be a tensor. "
                f"{structures.GAPS.get(kind, 'Convert it in the dataset.')}"
            )
        if spec.shape.rank is None:
            raise ConfigError(
                f"{name}: the rank of the element's part {path or 'x'} is not known. Set it in the dataset: "
                "dataset.map(lambda x, y: (tf.ensure_shape(x, [...]), y))."
            )


def _check_shapes(name: str, specs: Structure) -> None:
    """Refuses trailing shapes that are not static: the step is one compiled program."""
    for path, spec in structures.named_leaves(specs):
        if not spec.shape[1:].is_fully_defined():
            raise ConfigError(
                f"{name}: examples of the element's part {path or 'x'} have shape {spec.shape[1:]}, which is not known "
                "before it is read. Pad or crop them in the dataset (padded_batch(padded_shapes=...)), or state the "
                "shape: dataset.map(lambda x, y: (tf.ensure_shape(x, [...]), y))."
            )


def is_batched(specs: Structure) -> bool:
    """Whether elements are batches: every tensor has a first dim, the same for all where it is known."""
    shapes = [spec.shape for spec in tf.nest.flatten(specs)]
    return all(shape.rank > 0 for shape in shapes) and len({shape[0] for shape in shapes} - {None}) <= 1


def stream_ended(source: StreamSource) -> TrainingError:
    """Returns the error for a stream that has no examples, or another number of them than it was declared to have."""
    if source.info.num_examples == UNKNOWN:
        return TrainingError(f"{source.name}: {_EMPTY}")
    return TrainingError(
        f"{source.name}: the stream does not have {source.info.num_examples} examples. Correct "
        "from_dataset(..., examples=N), or leave it out to have them counted."
    )


def stream_error(source: StreamSource, error: BaseException) -> TrainingError:
    """Returns the error for a stream that could not be read, with the text of the operation that failed."""
    return TrainingError(
        f"{source.name}: the stream could not be read: {error_text(error)}. The examples of a stream have no numbers, "
        "so the one is not named; catch it in the dataset, e.g. with dataset.ignore_errors()."
    )
