"""`bf16`, `int8`, `sign` and the like: one payload of a value codec per bucket, in any of `patterns.PATTERNS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tfpar.collectives.cost_model import Cost, Link, Speed
from tfpar.collectives.group import Group
from tfpar.config import unknown_name
from tfpar.exchange.algorithms.patterns import PATTERNS
from tfpar.exchange.algorithms.whole_blocks import WholeBlocks
from tfpar.exchange.buckets import Bucket
from tfpar.exchange.options import Options, option, switch
from tfpar.exchange.registry import register
from tfpar_ops import Codec, codecs
from tfpar_ops.formats import FORMATS

import tensorflow as tf

# Formats that keep only some elements (`topk`) have options of their own, see `deep_gradient`.
_NAMES = tuple(name for name, entry in FORMATS.items() if not entry.keeps)
_SCALED = ", ".join(name for name in _NAMES if FORMATS[name].scale == "float")
_STOCHASTIC = ", ".join(name for name in _NAMES if FORMATS[name].stochastic)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueOptions(Options):
    """Options of an algorithm with a codec.

    Attributes:
      format: Name of the payload format, one of `tfpar_ops.formats.FORMATS`.
      pattern: How payloads move between workers, one of `PATTERNS`.
      block: Elements that share a scale; 0 for the default of the codec.
      scale: Dtype of the scales, `bf16` or `float32`.
      rounding: `nearest` or `stochastic`.
      pipeline: Whether chunks are encoded, sent, summed and decoded in one operation, where transport and pattern
        allow it.
      codec: The codec with these options.
    """

    format: str
    pattern: str = option("two_phase", f"How payloads move between workers: {', '.join(PATTERNS)}.")
    block: int = option(0, "Elements that share a scale, a power of two; 0: the codec's default.")
    scale: str = option("bf16", f"Dtype of the scales of {_SCALED}: {', '.join(codecs.SCALES)}.")
    rounding: str = option("nearest", f"How values of {_STOCHASTIC} are rounded: {', '.join(codecs.ROUNDINGS)}.")
    pipeline: bool = switch(True, "Whether chunks are encoded while others travel: two_phase over --transport=gloo.")
    codec: Codec = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pattern not in PATTERNS:
            raise unknown_name("pattern", str(self.pattern), PATTERNS)
        codec = self.make_codec(block=self.block, scale=self.scale, rounding=self.rounding)
        object.__setattr__(self, "codec", codec)

    def make_codec(self, **options: Any) -> Codec:
        """The codec.

        Raises:
          ValueError: The codec does not have one of the options, or not with this value.
        """
        return Codec(self.format, **options)

    def check_group(self, group: Group) -> None:
        """Refuses a group in which the pattern does not work; see `Options.check_group`."""
        workers = group.size
        if self.pattern == "halving_doubling" and workers & (workers - 1):
            raise ValueError(
                f"halving_doubling needs a power of two of workers, and there are {workers}. Use "
                "pattern=binary_blocks, which is the same for powers of two and works for any number."
            )
        if not supports_fan_in(self.pattern, group):
            otherwise = "" if self.sends_only_gradient else ", without momentum and ramp_steps"
            largest = group.capabilities.largest_fan_in
            raise ValueError(
                f"{self.pattern} adds up the payloads of all {workers} workers at once, and a GPU supports at most "
                f"{largest}. Use pattern=ring or binary_blocks{otherwise}, where two workers at a time exchange "
                "messages, or fewer workers with more GPUs each (--devices=0)."
            )

    def check_given(self, given: Collection[str]) -> None:
        """Refuses a pipeline where the pattern has none; see `Options.check_given`."""
        if "pipeline" in given and self.pipeline and not PATTERNS[self.pattern].can_pipeline:
            raise ValueError(
                f"pipeline=true has no effect with pattern={self.pattern}, which works without one. Use "
                "pattern=two_phase, or leave it out."
            )

    @property
    def pattern_name(self) -> str:
        """How payloads move between workers, in a word."""
        return self.pattern

    @property
    def penalty(self) -> float:
        """Factor by which `auto` multiplies the predicted time."""
        return PATTERNS[self.pattern].penalty

    @property
    def sparse_row_dtype(self) -> tf.DType:
        """The dtype in which the rows of an embedding are sent: only `bf16` rounds them."""
        return tf.bfloat16 if self.format == "bf16" else tf.float32


def supports_fan_in(pattern: str, group: Group) -> bool:
    """Whether a worker can add up as many payloads at once as a pattern needs."""
    largest = group.capabilities.largest_fan_in
    return not PATTERNS[pattern].sums_all_at_once or largest is None or group.size <= largest


def build(
    options: ValueOptions, shapes: Sequence[tf.TensorShape], group: Group, seed: int, name: str, **keywords: Any
) -> Bucket:
    """The bucket, see `registry.register`; `keywords` go to the pattern's."""

    pattern = PATTERNS[options.pattern]
    if pattern.can_pipeline:
        keywords["pipeline"] = options.pipeline

    def make(padded: Sequence[tf.TensorShape]) -> Bucket:
        return pattern.build(
            options.codec, padded, group, seed, name, error_feedback=options.error_feedback, **keywords
        )

    if FORMATS[options.format].mean_scale and len(shapes) > 1:
        return WholeBlocks(make, shapes, options.codec.block)
    return make(shapes)


def cost(options: ValueOptions, elements: int, workers: int, link: Link, speed: Speed) -> Cost:
    """The cost of exchanging one vector, see `registry.register`."""
    pattern = PATTERNS[options.pattern]
    keywords = {"pipeline": options.pipeline} if pattern.can_pipeline else {}
    return pattern.cost(options.codec, elements, workers, link, speed, **keywords)


def _register(name: str) -> None:
    def candidates(common: Mapping[str, Any], group: Group) -> list[ValueOptions]:
        if not FORMATS[name].automatic:
            return []
        return [
            ValueOptions(format=name, pattern=pattern, **common)
            for pattern, traits in PATTERNS.items()
            if traits.is_candidate and supports_fan_in(pattern, group)
        ]

    has_scale = FORMATS[name].scale != "none"
    register(
        name,
        ValueOptions,
        build,
        cost=cost,
        candidates=candidates,
        summary=f"{name} values{' with a scale per block' * has_scale}",
        example="block=512,pattern=ring" if has_scale else "pattern=ring,warmup_steps=100",
        fixed={"format": name},
    )


for _name in _NAMES:
    _register(_name)
