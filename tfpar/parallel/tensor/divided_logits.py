"""Logits of which every device of the model axis has those of some classes, and what can be said of all of them.

Gathering the logits of a vocabulary is the dearest thing that devices could tell each other: V numbers per position.
A cross-entropy needs two: the logarithm of each device's sum of exponentials, and the label's logit of the device that
has it (Shoeybi et al. 2019, arXiv:1909.08053, section 3). So a head whose outputs are those of the model leaves them
divided while somebody `keeps` them, and what asks for more gathers them then.

Shape suffixes: V classes, n of them on a device, t devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_internals
from tfpar.parallel.model_axis import Place

import tensorflow as tf

_ATTRIBUTE = "_tfpar_divided_logits"
# The logit of a class that is none, of padding: finite, since -inf - -inf is NaN where a device has no other.
_NO_CLASS = -1e30


@dataclasses.dataclass(frozen=True, eq=False)
class DividedLogits:
    """This device's part of logits.

    Attributes:
      place: The device.
      own: `[..., n]`: the logits of classes `rank * n` to `(rank + 1) * n`.
      classes: V; where t x n is more, the last are padding.
    """

    place: Place
    own: tf.Tensor
    classes: int
    _gathered: list[tf.Tensor] = dataclasses.field(default_factory=list, repr=False)

    @property
    def padding(self) -> int:
        """Number of classes that are none."""
        return self.place.size * self.own.shape[-1] - self.classes

    def gathered(self) -> tf.Tensor:
        """All logits `[..., V]`, on every device; gathered once."""
        if not self._gathered:
            logits = self.place.gather(self.own, self.padding)
            self._gathered.append(keras_internals.set_mask(logits, keras_internals.mask_of(self.own)))
        return self._gathered[0]

    def cross_entropy(self, labels: tf.Tensor, dtype: str = "float32") -> tf.Tensor:
        """Cross-entropy of each position, as `tf.nn.sparse_softmax_cross_entropy_with_logits` has it of all logits.

        Args:
          labels: Integers `[...]`; of one that is no class the result is NaN, as that function has it on GPUs.
          dtype: What to compute in.

        Returns:
          `[...]` of `dtype`, the same on every device. Its gradient asks nothing of the others.
        """
        place, width = self.place, self.own.shape[-1]
        labels = tf.cast(labels, tf.int32)
        local = labels - place.rank * width
        has_label = (local >= 0) & (local < width)

        @tf.custom_gradient
        def operator(logits: tf.Tensor) -> tuple[tf.Tensor, Any]:
            label_logit = tf.gather(logits, tf.where(has_label, local, 0), batch_dims=labels.shape.rank)
            own = [tf.reduce_logsumexp(logits, axis=-1), tf.where(has_label, label_logit, 0.0)]
            log_sums, of_label = tf.unstack(place.collect(tf.stack(own)), axis=1)
            log_sum = tf.reduce_logsumexp(log_sums, axis=0)
            entropy = log_sum - tf.reduce_sum(of_label, axis=0)

            def backward(upstream: tf.Tensor) -> tf.Tensor:
                one_hot = tf.one_hot(tf.where(has_label, local, -1), width, dtype=logits.dtype)
                return upstream[..., tf.newaxis] * (tf.exp(logits - log_sum[..., tf.newaxis]) - one_hot)

            return entropy, backward

        entropy = operator(self._without_padding(tf.cast(self.own, dtype)))
        is_class = (labels >= 0) & (labels < self.classes)
        return tf.where(is_class, entropy, tf.constant(float("nan"), entropy.dtype))

    def best(self) -> tf.Tensor:
        """The class of the largest logit, int32 `[...]`; of equal ones the first, as in `tf.argmax`. No gradient."""
        width = self.own.shape[-1]
        logits = self._without_padding(tf.cast(tf.stop_gradient(self.own), tf.float32))
        own = tf.argmax(logits, axis=-1, output_type=tf.int32)
        largest = self.place.collect(tf.reduce_max(logits, axis=-1))
        device = tf.argmax(largest, axis=0, output_type=tf.int32)
        classes = self.place.collect(own + self.place.rank * width)
        return tf.reduce_sum(tf.where(tf.one_hot(device, self.place.size, True, False, axis=0), classes, 0), axis=0)

    def _without_padding(self, logits: tf.Tensor) -> tf.Tensor:
        if not self.padding:
            return logits
        width = logits.shape[-1]
        classes = self.place.rank * width + tf.range(width)
        return tf.where(classes < self.classes, logits, tf.constant(_NO_CLASS, logits.dtype))


class _Keeping(threading.local):
    """The logits that this thread keeps divided, None where it keeps none: MirroredStrategy traces every device in a
    thread of its own."""

    def __init__(self) -> None:
        self.kept: list[DividedLogits] | None = None


_keeping = _Keeping()


@contextlib.contextmanager
def kept_divided() -> Iterator[list[DividedLogits]]:
    """In this context the logits that a model returns may be divided; elsewhere they are gathered.

    Yields:
      Those that are, for `check_returned`.
    """
    before, _keeping.kept = _keeping.kept, []
    try:
        yield _keeping.kept
    finally:
        _keeping.kept = before


def returned(logits: DividedLogits) -> tf.Tensor:
    """What a head returns whose outputs are those of the model."""
    if _keeping.kept is None:
        return logits.gathered()
    _keeping.kept.append(logits)
    vars(logits.own)[_ATTRIBUTE] = logits
    return logits.own


def check_returned(kept: Sequence[DividedLogits], outputs: Sequence[Any]) -> None:
    """Refuses a model that does something else with divided logits than to return them.

    Args:
      kept: From `kept_divided`.
      outputs: What the model has returned, flat.

    Raises:
      ConfigError: With the way out.
    """
    if len([each for each in kept if any(divided(output) is each for output in outputs)]) < len(kept):
        raise ConfigError(
            "--mesh: the model changes the logits of its last layer, whose classes are divided over devices, in a way "
            "that its graph does not show. Keep that layer whole, with layout={'REGEX': 'whole'}."
        )


def divided(tensor: Any) -> DividedLogits | None:
    """What a model's output is a part of; None where it is whole."""
    return getattr(tensor, _ATTRIBUTE, None)


def gathered(tensor: Any) -> Any:
    """A model's output as a whole."""
    logits = divided(tensor)
    return tensor if logits is None else logits.gathered()
