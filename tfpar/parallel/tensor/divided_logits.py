"""Logits that are divided by class over the devices of the model axis, and functions of all of them.

Gathering the logits of a vocabulary is the most expensive communication of a replica: V numbers per position. A
cross-entropy needs only two: the logarithm of each device's sum of exponentials, and the logit of the label, from the
device that holds it (Shoeybi et al. 2019, arXiv:1909.08053, section 3). So a head whose outputs are those of the model
leaves them divided within `kept_divided`, and code that needs all logits gathers them there.

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
# The logit of a padding class: finite, because -inf - -inf is NaN on a device that has only padding.
_NO_CLASS = -1e30


@dataclasses.dataclass(frozen=True, eq=False)
class DividedLogits:
    """This device's part of logits.

    Attributes:
      place: The device.
      own: `[..., n]`: the logits of classes `rank * n` to `(rank + 1) * n`.
      classes: V; if t x n is larger, the last classes are padding.
    """

    place: Place
    own: tf.Tensor
    classes: int
    _gathered: list[tf.Tensor] = dataclasses.field(default_factory=list, repr=False)

    @property
    def padding(self) -> int:
        """Number of padding classes."""
        return self.place.size * self.own.shape[-1] - self.classes

    def gathered(self) -> tf.Tensor:
        """Returns all logits `[..., V]` on every device; they are gathered once."""
        if not self._gathered:
            logits = self.place.gather(self.own, self.padding)
            self._gathered.append(keras_internals.set_mask(logits, keras_internals.mask_of(self.own)))
        return self._gathered[0]

    def cross_entropy(self, labels: tf.Tensor, dtype: str = "float32") -> tf.Tensor:
        """Returns the cross-entropy of each position, like `tf.nn.sparse_softmax_cross_entropy_with_logits`.

        Args:
          labels: Integers `[...]`; a label that is not a class gives NaN, as that function does on GPUs.
          dtype: The dtype of the computation.

        Returns:
          `[...]` of `dtype`, the same on every device. Its gradient needs no communication.
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
        """Returns the class of the largest logit, int32 `[...]`, the first of equals like `tf.argmax`. No gradient."""
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
    """The logits that this thread keeps divided, or None.

    Per thread, because MirroredStrategy traces every device in a separate thread.
    """

    def __init__(self) -> None:
        self.kept: list[DividedLogits] | None = None


_keeping = _Keeping()


@contextlib.contextmanager
def kept_divided() -> Iterator[list[DividedLogits]]:
    """Returns a context in which the logits that a model returns may stay divided; elsewhere they are gathered.

    Yields:
      The divided logits, for `check_returned`.
    """
    before, _keeping.kept = _keeping.kept, []
    try:
        yield _keeping.kept
    finally:
        _keeping.kept = before


def returned(logits: DividedLogits) -> tf.Tensor:
    """Returns the result of a head whose outputs are those of the model."""
    if _keeping.kept is None:
        return logits.gathered()
    _keeping.kept.append(logits)
    vars(logits.own)[_ATTRIBUTE] = logits
    return logits.own


def check_returned(kept: Sequence[DividedLogits], outputs: Sequence[Any]) -> None:
    """Refuses a model that does anything with divided logits except return them.

    Args:
      kept: The value of `kept_divided`.
      outputs: The outputs of the model, flattened.

    Raises:
      ConfigError: The model uses them in another way; the message says what to do.
    """
    if len([each for each in kept if any(divided(output) is each for output in outputs)]) < len(kept):
        raise ConfigError(
            "--mesh: the model changes the logits of its last layer outside its graph, but their classes are divided "
            "over devices. Keep that layer whole, with layout={'REGEX': 'whole'}."
        )


def divided(tensor: Any) -> DividedLogits | None:
    """Returns the divided logits of which a model's output is a part; None if the output is whole."""
    return getattr(tensor, _ATTRIBUTE, None)


def gathered(tensor: Any) -> Any:
    """Returns a model's output, gathered if it is divided."""
    logits = divided(tensor)
    return tensor if logits is None else logits.gathered()
