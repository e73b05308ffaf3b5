"""The replies of clients over Flower, which may contain anything: what the server checks before it averages them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfpar.outer.federated.encoding import UpdateEncoding

import numpy as np
import tensorflow as tf

# A client that claims more counts as dropped out, so that weighted sums of finite values stay finite in float32.
MOST_EXAMPLES = 10**9


class BadReplyError(Exception):
    """A reply that cannot be averaged; its text is the reason."""


class Reply(NamedTuple):
    """A reply that can be averaged.

    Attributes:
      movement: The decoded movement, float32 tensors with the shapes of the trainable weights.
      norm: Its L2 norm, finite.
      changes: The changes of the model's floating-point state.
      examples: Number of examples on which the client has trained, from 1 to `MOST_EXAMPLES`.
      loss: Mean loss of these examples, finite.
      num_bytes: Size of the arrays as they were sent.
    """

    movement: list[tf.Tensor]
    norm: float
    changes: list[np.ndarray]
    examples: float
    loss: float
    num_bytes: int


def read_reply(content: Any, encoding: UpdateEncoding, state: Sequence[tf.TensorSpec]) -> Reply:
    """Checks and decodes a reply.

    Args:
      content: The content of Flower's message.
      encoding: The encoding of movements.
      state: Shapes and dtypes of the model's floating-point state.

    Raises:
      BadReplyError: It has other arrays than expected, values that are not finite, or metrics that are missing or out
        of range.
    """
    try:
        arrays, figures = content["arrays"].to_numpy_ndarrays(), content["metrics"]
    except Exception as error:  # whatever Flower or NumPy raises for a message that another program has made
        raise BadReplyError(f"its message cannot be read ({type(error).__name__}: {error})") from error
    expected = [*encoding.sent, *state]
    if len(arrays) != len(expected):
        raise BadReplyError(f"it has {len(arrays)} arrays, and the model and --update_codec need {len(expected)}")
    for place, (array, spec) in enumerate(zip(arrays, expected, strict=True)):
        found, wanted = _described(array), f"{np.dtype(spec.dtype.as_numpy_dtype)} {spec.shape.as_list()}"
        if found != wanted:
            raise BadReplyError(f"its array {place} is {found}, and the model and --update_codec need {wanted}")
    count = len(encoding.sent)
    try:
        movement = encoding.decode([*map(tf.constant, arrays[:count])])
    except tf.errors.InvalidArgumentError as error:
        raise BadReplyError(f"a payload is not one of --update_codec ({error.message})") from error
    norm, changes = _norm(movement, "update"), arrays[count:]
    _norm(changes, "change of state")
    examples, loss = _number(figures, "num-examples"), _number(figures, "loss")
    if not 1 <= examples <= MOST_EXAMPLES or examples != int(examples):
        raise BadReplyError(f"its num-examples is {examples:g}, not a whole number from 1 to {MOST_EXAMPLES}")
    return Reply(movement, norm, changes, examples, loss, sum(array.nbytes for array in arrays))


def _described(array: Any) -> str:
    # NumPy also reads archives of arrays.
    return f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__


def _norm(values: Sequence[Any], what: str) -> float:
    """The L2 norm of some tensors in float32; refuses one that is not finite."""
    norm = float(tf.linalg.global_norm(values)) if values else 0.0
    if not math.isfinite(norm):
        raise BadReplyError(f"the norm of its {what} is {norm:g}")
    return norm


def _number(figures: Mapping[str, Any], name: str) -> float:
    """A metric; refuses one that is not a finite number."""
    value = figures.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadReplyError(f"its {name} is {value!r}, not a finite number")
    return float(value)
