"""One loss term as a numerator and a denominator that add up over examples, micro-batches and replicas.

Keras reduces a loss `[m, ...]` to a mean over a whole batch, with weights and masks inside. Here the mean is split, so
that parts of a batch add up to the same number. Both are kept in units of examples: sums over examples of means over
the trailing dims, whose quotient is Keras' mean and whose size does not depend on the number of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tfpar.config import ConfigError
from tfpar.optim import keras_internals
from tfpar.parallel.tensor.divided_logits import gathered
from tfpar.training.objective.divided import divided_loss
from tfpar.training.objective.whole_loss import numerator_of

import keras
import tensorflow as tf

SUM = "sum"
BY_SAMPLE_WEIGHT = "mean_with_sample_weight"


class TermSums(NamedTuple):
    """A loss term of one micro-batch: float32 scalars.

    Attributes:
      numerator: Sum of weight x loss.
      denominator: Divides the numerator, once both are summed. A loss with reduction `sum` is not divided; its
        denominator is the sum of the example weights.
      masked: Whether a mask was found.
      whole: Whether the loss is one value for the batch; see `whole_loss`.
    """

    numerator: tf.Tensor
    denominator: tf.Tensor
    masked: bool
    whole: bool = False


def term_sums(
    loss: keras.losses.Loss, y: Any, outputs: Any, sample_weight: Any, weight: tf.Tensor, *, by_positions: bool
) -> TermSums:
    """Numerator and denominator of a loss over one micro-batch.

    Args:
      loss: The loss; its `reduction` is honoured as in Keras, None being a mean.
      y: Labels `[m, ...]`.
      outputs: Outputs `[m, ...]`. A mask that they carry counts, and so does one that the loss sets (`ignore_class`).
      sample_weight: Float `[m]` or `[m, ...]`, or None.
      weight: Float32 `[m]`: 1 for an example, 0 for padding.
      by_positions: Whether to average over all unmasked positions, as Keras does; otherwise over the positions of each
        example first; an example without unmasked positions counts as 0.

    Raises:
      ConfigError: The loss keeps neither one value per example nor one for the batch, or weights or masks do not fit
        its values.
    """
    found, outputs = _values(loss, y, outputs)
    if tf.convert_to_tensor(found).shape.rank == 0:  # a mask of the outputs does not change it, as in Keras
        value = numerator_of(tf.cast(found, tf.float32), sample_weight, weight, is_sum=loss.reduction == SUM)
        return TermSums(value, tf.reduce_sum(weight), False, whole=True)
    masks = [mask for mask in map(keras_internals.mask_of, (outputs, found)) if mask is not None]
    values = _per_example(found, weight)
    if not masks and sample_weight is None:
        per_example = _mean(values) if loss.reduction != SUM else _sum(values)
        return TermSums(tf.reduce_sum(per_example * weight), tf.reduce_sum(weight), False)
    mask = _product([tf.cast(mask, tf.float32) for mask in masks], "the mask of the outputs")
    if mask is not None and not by_positions and loss.reduction != SUM:
        shares = _mean(mask)  # an example's positions share its weight
        mask *= expanded(tf.math.divide_no_nan(tf.ones_like(shares), shares), mask.shape.rank)
    own = _product([*([] if mask is None else [mask]), *_weights(sample_weight)], "the sample weights")
    weighted, own = _weighted(values, own)
    numerator = _sum(weighted) if loss.reduction == SUM else _mean(weighted)
    if loss.reduction == BY_SAMPLE_WEIGHT:
        denominator = _sum(own) / float(weighted.shape[1:].num_elements())
    elif mask is not None and by_positions and loss.reduction != SUM:
        denominator = _mean(mask)
    else:
        denominator = tf.ones_like(weight)
    return TermSums(tf.reduce_sum(numerator * weight), tf.reduce_sum(denominator * weight), bool(masks))


def _values(loss: keras.losses.Loss, y: Any, outputs: Any) -> tuple[Any, Any]:
    """The values of a loss, and the outputs as the loss used them: divided if that is enough, otherwise whole."""
    found = divided_loss(loss, y, outputs)
    if found is not None:
        return found, outputs
    outputs = keras.tree.map_structure(gathered, outputs)
    return called(loss, y, outputs), outputs


def called(loss: keras.losses.Loss, y: Any, outputs: Any) -> Any:
    """The values that a loss returns before any reduction, for labels and outputs of any dtype.

    A loss that overrides `__call__`, which reduces, has only the one value for the batch that this returns.
    """
    if overrides_reduction(loss):
        with keras_internals.unscaled_losses():
            return loss(y, outputs)
    return loss.call(_as(y, loss.dtype), _as(outputs, loss.dtype))


def overrides_reduction(loss: keras.losses.Loss) -> bool:
    """Whether a loss does more than to reduce the values of its `call`."""
    return type(loss).__call__ is not keras.losses.Loss.__call__


def _as(structure: Any, dtype: str) -> Any:
    """Converts arguments as Keras' losses do. Losses are always computed in float32, whatever the model's dtype."""
    return keras.tree.map_structure(lambda part: keras.ops.convert_to_tensor(part, dtype=dtype), structure)


def _per_example(values: Any, weight: tf.Tensor) -> tf.Tensor:
    """The values that a loss returned, as float32 `[m, ...]`."""
    values = tf.cast(values, tf.float32)
    if values.shape.rank is None:
        raise ConfigError("the loss returned a value of unknown rank: it must keep one value per example.")
    if not values.shape[:1].is_compatible_with(weight.shape):
        raise ConfigError(
            f"the loss returned {values.shape[0]} values for {weight.shape[0]} examples; it must keep one for each."
        )
    return values


def _weights(sample_weight: Any) -> list[tf.Tensor]:
    return [] if sample_weight is None else [tf.cast(sample_weight, tf.float32)]


def _product(parts: Sequence[tf.Tensor], what: str) -> tf.Tensor | None:
    """The product of position weights; weights of lower rank apply to all positions of the last dims."""
    if not parts:
        return None
    product, *others = parts
    for part in others:
        product, part = keras_internals.matching_ranks(product, part)
        rank = max(product.shape.rank, part.shape.rank)
        product = _multiplied(expanded(product, rank), expanded(part, rank), what)
    return product


def _weighted(values: tf.Tensor, own: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Values times position weights, and the weights; a weight that applies to several positions is repeated.

    Weights of size 1 in a dim are not repeated, as in Keras' sum of weights (`mean_with_sample_weight`).
    """
    values, own = keras_internals.matching_ranks(values, own)
    if own.shape.rank > values.shape.rank:
        raise ConfigError(
            f"the loss returned values of shape {_shown(values)}, but there are weights or a mask of shape "
            f"{_shown(own)}: the loss must keep a value for each position that is weighted."
        )
    missing = values.shape.rank - own.shape.rank
    if missing:
        own = expanded(own, values.shape.rank)
        own = own * tf.ones([1] * (values.shape.rank - missing) + values.shape[-missing:])
    return _multiplied(values, own, "the values of the loss"), own


def _multiplied(one: tf.Tensor, other: tf.Tensor, what: str) -> tf.Tensor:
    try:
        tf.broadcast_static_shape(one.shape, other.shape)
    except ValueError as error:
        raise ConfigError(
            f"sample weights or masks of shape {_shown(other)} do not fit {what}, of shape {_shown(one)}. Give a "
            "weight per example, [m], or one per position."
        ) from error
    return one * other


def expanded(tensor: tf.Tensor, rank: int) -> tf.Tensor:
    """The tensor with dims of size 1 at its end."""
    for _ in range(rank - tensor.shape.rank):
        tensor = tensor[..., None]
    return tensor


def _mean(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(values, axis=list(range(1, values.shape.rank))) if values.shape.rank > 1 else values


def _sum(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(values, axis=list(range(1, values.shape.rank))) if values.shape.rank > 1 else values


def _shown(tensor: tf.Tensor) -> str:
    return f"[m{''.join(f', {size}' for size in tensor.shape[1:])}]"
