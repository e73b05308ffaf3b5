"""Options of exchange algorithms: what may follow the name in `--exchange=NAME:key=value,...`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from tfpar.collectives.group import Group
from tfpar.exchange.buckets import COMPRESSED_BUCKET_BYTES
from tfpar_ops import Codec

import tensorflow as tf


def option(
    default: Any,
    help: str,  # noqa: A002 - the word absl uses for the same thing
    *,
    allowed: str = "",
    is_valid: Callable[[Any], bool] | None = None,
    alias: str = "",
    read: Callable[[str], Any] | None = None,
) -> Any:
    """A field of an options class that can be given after the name of the algorithm.

    Args:
      default: The default value.
      help: One sentence for `python -m tfpar.exchange`, with units.
      allowed: The allowed values in words, for errors: "a whole number of at least 0".
      is_valid: Whether a value is one of these; by default the class checks the value itself.
      alias: Another name of the option.
      read: For the one option that may come first without its name, as in `topk:0.01`: parses the text, or raises
        ValueError.
    """
    metadata = {"help": help, "allowed": allowed, "is_valid": is_valid or _anything, "alias": alias, "read": read}
    return dataclasses.field(default=default, metadata=metadata)


def whole(default: int, help: str, *, minimum: int = 0, alias: str = "") -> Any:  # noqa: A002
    """An `option` that is a whole number of at least `minimum`."""

    def is_valid(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= minimum

    allowed = f"a whole number of at least {minimum}"
    return option(default, help, allowed=allowed, is_valid=is_valid, alias=alias)


def switch(default: bool, help: str) -> Any:  # noqa: A002
    """An `option` that is true or false."""
    return option(default, help, allowed="true or false", is_valid=lambda value: isinstance(value, bool))


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options that all algorithms share. An algorithm adds its own in a subclass, and defines their consequences.

    Attributes:
      error_feedback: Whether to add the residual of a payload to the next one.
      warmup_steps: Exchanges at the start in which gradients are sent dense.
      min_elements: Tensors with fewer elements, and all with fewer than two dims, are sent dense with the sidecar.
      bucket_bytes: Tensors are fused up to this many bytes of float32.
      sample_every: Exchanges from one comparison with the dense mean to the next, for TensorBoard. 0: never.
      overlap: Whether buckets are sent while other gradients are being computed, if those come one after the other.
      codec: The codec of the payloads, for algorithms that have one: `auto` measures its speed and its error.

    Raises:
      ValueError: A value that is not allowed.
    """

    error_feedback: bool = switch(True, "Whether to add the residual of a payload to the next one.")
    warmup_steps: int = whole(0, "Steps at the start in which gradients are sent dense.")
    min_elements: int = whole(1024, "Tensors with fewer elements, and all with fewer than two dims, travel dense.")
    bucket_bytes: int = whole(
        COMPRESSED_BUCKET_BYTES, "Tensors are fused into buckets of up to this many bytes of float32.", minimum=1
    )
    sample_every: int = whole(1000, "Steps between two comparisons with the dense mean, for TensorBoard. 0: never.")
    overlap: bool = switch(True, "Whether buckets are sent while other gradients are being computed.")
    codec: Codec | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata and not field.metadata["is_valid"](value):
                raise ValueError(f"{field.name}={value!r} is not {field.metadata['allowed']}.")

    def is_compressible(self, shape: tf.TensorShape) -> bool:
        """Whether a tensor is large enough, and not a bias or a norm, which have one dim."""
        return len(shape) >= 2 and shape.num_elements() >= self.min_elements

    def check_group(self, group: Group) -> None:
        """Refuses a group in which the algorithm does not work.

        Raises:
          ValueError: The algorithm does not work for this number of workers, or on their devices.
        """
        del group

    def check_given(self, given: Collection[str]) -> None:
        """Refuses options that have no effect beside the others, though they have the default value.

        Args:
          given: Names of the options that were given.

        Raises:
          ValueError: One of them has no effect.
        """
        del given

    @property
    def pattern_name(self) -> str:
        """How payloads move between workers, in a word, for reports."""
        return "all_reduce"

    @property
    def description(self) -> str:
        """How payloads move between workers, in a few words, for the line printed at the start."""
        return self.pattern_name

    @property
    def sends_only_gradient(self) -> bool:
        """Whether a payload contains only gradient and residual.

        Then the rows of an embedding may be sent separately, and a bucket may be sent before it is known whether the
        step is applied: its state can change afterwards.
        """
        return True

    @property
    def penalty(self) -> float:
        """Factor by which `auto` multiplies the predicted time, if the exchange is known to take longer."""
        return 1.0

    @property
    def sparse_row_dtype(self) -> tf.DType:
        """The dtype in which the rows of an embedding are sent: float32 or bfloat16."""
        return tf.float32


def _anything(_: Any) -> bool:
    return True
