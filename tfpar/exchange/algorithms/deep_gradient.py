"""The additions of Deep Gradient Compression to `topk` (Lin et al. 2018): momentum correction, factor masking, a ramp.

Functions run once per worker, on its first device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfpar.collectives.group import Group
from tfpar.exchange import buckets
from tfpar.exchange.algorithms import value_codecs
from tfpar.exchange.algorithms.value_codecs import ValueOptions
from tfpar.exchange.buckets import Bucket, PendingAssigns, WireBytes
from tfpar.exchange.counting import as_tensor
from tfpar.exchange.options import is_number, option, whole
from tfpar.exchange.registry import register
from tfpar_ops import Codec, codecs
from tfpar_ops.formats import FORMATS

import tensorflow as tf

# Shares of elements kept during the ramp, of which those above the final one are used: the paper's warm-up, an epoch
# each.
RAMP = (0.25, 0.0625, 0.015625, 0.004)
# Patterns whose payloads contain only elements that this worker chose, so that it knows what was sent.
_PATTERNS = ("two_phase", "all_gather", "hierarchical")


def _read_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{text!r} is not a share of elements in (0, 1], as in topk:0.01.")
    return share


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKOptions(ValueOptions):
    """Options of `topk`.

    Attributes:
      share: Share of the elements of each block that are kept.
      momentum: Momentum correction, see `DeepGradient`.
      ramp_steps: Exchanges after `warmup_steps` over which the share that is sent falls to its final value.
    """

    share: float = option(0.01, "Share of elements that are sent, in (0, 1].", read=_read_share)
    momentum: float = option(
        0.0,
        "Momentum correction, for an optimizer without momentum.",
        allowed="a number in [0, 1)",
        is_valid=lambda value: is_number(value) and 0.0 <= value < 1.0,
    )
    ramp_steps: int = whole(0, "Steps after warmup_steps over which the share that is sent falls to its final value.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum and not self.error_feedback:
            raise ValueError("momentum correction needs error_feedback=true, to which it adds.")
        if not self.sends_only_gradient and self.pattern not in _PATTERNS:
            raise ValueError(f"momentum and ramp_steps work with pattern={' or '.join(_PATTERNS)}, not {self.pattern}.")

    def make_codec(self, **options: Any) -> Codec:
        """The codec that keeps the share of elements.

        Raises:
          ValueError: The share is of less than half an element of a block; or the codec does not have an option.
        """
        block = Codec("topk", keep=1, **options).block
        if self.share * block < 0.5:
            largest = FORMATS["topk"].blocks[-1]
            raise ValueError(
                f"share={self.share:g} is less than half an element of a block of {block}, of which at least one is "
                f"sent. Use share={1 / block:.6f} or more, or larger blocks (block={largest} is the largest)."
            )
        return Codec("topk", keep=max(1, round(self.share * block)), **options)

    @property
    def sends_only_gradient(self) -> bool:
        """False with momentum or a ramp: then a velocity is sent, which depends on what was sent before."""
        return not (self.momentum or self.ramp_steps)


class DeepGradient:
    """A `topk` bucket with momentum correction, factor masking and a ramp.

    Momentum correction: what is accumulated and sent is the velocity u = m u + g of the worker instead of the gradient,
    so that an element which waits gathers momentum as it would have in dense training. The optimizer must then have no
    momentum: use plain SGD. Factor masking: where an element is sent, the velocity restarts from 0, so that stale
    momentum does not carry it on. Ramp: over `ramp_steps` exchanges the share of elements that are kept falls through
    `RAMP`.

    Args:
      options: Options with `momentum` or `ramp_steps`.
      shapes: Static shapes of the tensors.
      group: All workers.
      seed: Not used by `topk`.
      name: Prefix of the variables' names.
    """

    factor_rank = 0

    def __init__(
        self, options: TopKOptions, shapes: Sequence[tf.TensorShape], group: Group, seed: int, name: str
    ) -> None:
        codec = options.codec
        self.shapes = list(shapes)
        self._momentum = options.momentum
        self._final = value_codecs.build(options, shapes, group, seed, name)
        self.elements, self.shard_elements = self._final.elements, self._final.shard_elements
        self.state = dict(self._final.state)
        stages = [
            dataclasses.replace(options, share=share)
            for share in RAMP
            if options.ramp_steps and round(share * codec.block) > codec.keep
        ]
        # All stages have the same blocks and shards, hence the same residuals.
        self._stages: list[Bucket] = [
            *(value_codecs.build(stage, shapes, group, seed, name, state=self._final.state) for stage in stages),
            self._final,
        ]
        self._stage_steps = max(1, options.ramp_steps // max(1, len(stages)))
        self._start = options.warmup_steps
        if self._momentum:
            self.state["velocity"] = buckets.worker_variable([self.elements], f"{name}_velocity")

    def reduce(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, pending: PendingAssigns | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums tensors over the workers; see `buckets.Bucket`. With momentum, the sums are of velocities."""
        if pending is not None:
            raise ValueError(
                "momentum and ramp_steps change the state immediately, because the velocity depends on what is sent"
            )
        if not self._momentum:
            return self._reduce_stage(tensors, step)
        velocity, residual = self.state["velocity"], self.state["worker"]
        moved = self._momentum * velocity.read_value() + buckets.concatenated(tensors)
        accumulated = moved + residual.read_value()
        with tf.control_dependencies([accumulated]):
            sums, norms = self._reduce_stage(buckets.split(moved, self.shapes), step)
        with tf.control_dependencies([norms, *sums]):
            # Everything that was not sent is in the residual, to the last bit.
            velocity.assign(tf.where(residual.read_value() == accumulated, moved, 0.0), read_value=False)
        return sums, norms

    def wire_bytes(self) -> WireBytes:
        """Bytes per exchange and worker after the ramp."""
        return self._final.wire_bytes()

    def wire_bytes_at(self, step: tf.Tensor) -> tf.Tensor:
        """Bytes of an exchange, see `counting.bytes_of`."""
        return tf.gather([as_tensor(bucket.wire_bytes()) for bucket in self._stages], self._stage(step))

    def _stage(self, step: tf.Tensor) -> tf.Tensor:
        """The stage of the ramp that an exchange belongs to: int32 scalar."""
        stage = tf.clip_by_value((step - self._start) // self._stage_steps, 0, len(self._stages) - 1)
        return tf.cast(stage, tf.int32)

    def _reduce_stage(self, tensors: Sequence[tf.Tensor], step: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        if len(self._stages) == 1:
            return self._final.reduce(tensors, step)
        flat = tf.switch_case(
            self._stage(step),
            [lambda bucket=bucket: _flatten(bucket.reduce(tensors, step)) for bucket in self._stages],
        )
        return flat[:-1], flat[-1]


def _flatten(result: tuple[list[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
    return [*result[0], result[1]]


def build(options: TopKOptions, shapes: Sequence[tf.TensorShape], group: Group, seed: int, name: str) -> Bucket:
    """The bucket, see `registry.register`."""
    make = value_codecs.build if options.sends_only_gradient else DeepGradient
    return make(options, shapes, group, seed, name)


register(
    "topk",
    TopKOptions,
    build,
    cost=value_codecs.cost,
    summary="the largest elements of each block, with Deep Gradient Compression (Lin et al. 2018)",
    example="momentum=0.9,ramp_steps=1000",
    # The sent elements are exact: there is no scale, no rounding, and no pipeline.
    fixed={"format": "topk", "scale": codecs.SCALES[0], "rounding": codecs.ROUNDINGS[0], "pipeline": False},
)
