"""Which tensors travel encoded, in which buckets, with which codec and pattern."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from tfpar.collectives.group import Group
from tfpar.collectives.tensorflow import is_gpu
from tfpar.config import ConfigError
from tfpar.exchange import spec as specs
from tfpar.exchange.algorithms.deep_gradient import DeepGradient
from tfpar.exchange.algorithms.dense import Dense
from tfpar.exchange.algorithms.point_to_point import Staged
from tfpar.exchange.algorithms.powersgd import PowerSGD, worthwhile
from tfpar.exchange.algorithms.two_phase import Collective
from tfpar.exchange.buckets import Bucket
from tfpar.exchange.spec import Spec
from tfpar.exchange.tuning import cost_model, measure
from tfpar.exchange.tuning.cost_model import Cost
from tfpar_ops.codecs import GPU_PEERS

import tensorflow as tf

# What `auto` chooses from. fp16 is not among them: its range does not suit every gradient. topk and powersgd leave out
# most of a gradient at every step, which no error on random numbers describes.
_CANDIDATES = ("none", "bf16", "fp8", "int8", "int4", "int2", "sign")
_PATTERNS = ("two_phase", "all_gather", "ring", "binary_blocks")
# Every hop of these waits for the one before, with encoding and decoding between, which the model takes for free; where
# they are predicted to be equal, they took 1.35 to 1.45 times as long (4 hosts, 1 Gbit/s and unshaped).
_HANDICAP = {"ring": 1.4, "binary_blocks": 1.4}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `auto` has decided, the same on all workers.

    Attributes:
      specs: Of each bucket.
      table: What was measured, and what each bucket is expected to cost, as text.
    """

    specs: list[Spec]
    table: str


def check_workers(spec: Spec, workers: int, device: str) -> None:
    """Refuses a pattern that does not work for a number of workers.

    Args:
      spec: The exchange.
      workers: How many there are.
      device: Where the exchange runs.

    Raises:
      ConfigError: See there.
    """
    if spec.pattern == "halving_doubling" and workers & (workers - 1):
        raise ConfigError(
            f"--exchange={spec.text}: halving_doubling needs a power of two of workers, and there are {workers}. Use "
            "pattern=binary_blocks, which is the same for powers of two and works for any number."
        )
    if spec.codec is not None and not can_sum(spec.pattern, workers, device):
        otherwise = ", without momentum and ramp_steps" if bucket_type(spec) is DeepGradient else ""
        raise ConfigError(
            f"--exchange={spec.text}: {spec.pattern} adds up the payloads of all {workers} workers at once, and a GPU "
            f"takes at most {GPU_PEERS}. Use pattern=ring or binary_blocks{otherwise}, where two workers at a time "
            "exchange messages, or fewer workers with more GPUs each (--devices=0)."
        )


def can_sum(pattern: str, workers: int, device: str) -> bool:
    """Whether a device can add up as many payloads at once as a pattern asks for."""
    return pattern not in specs.COLLECTIVES or workers <= GPU_PEERS or not is_gpu(device)


def travels_encoded(spec: Spec, shape: tf.TensorShape) -> bool:
    """Whether a tensor is large enough, and not of a sensitive kind (bias, norm), which all have one dim."""
    if len(shape) < 2 or shape.num_elements() < spec.min_elements:
        return False
    return not spec.rank or worthwhile(shape, spec.rank)


def dense(spec: Spec) -> Spec:
    """An exchange of the tensors that a spec encodes, in which nothing is encoded.

    Its buckets deliver what codecs have kept back where no codec is at work any more: on a single worker, or after a
    change to `none`.
    """
    return dataclasses.replace(
        spec, name="none", codec=None, error_feedback=True, warmup_steps=0, momentum=0.0, ramp_steps=0, sample_every=0
    )


def bucket_type(spec: Spec) -> Callable[..., Bucket]:
    """What carries out a spec for one bucket."""
    if spec.rank:
        return PowerSGD
    if spec.codec is None:
        return Dense
    if spec.momentum or spec.ramp_steps:
        return DeepGradient
    return Staged if spec.pattern in specs.STAGED else Collective


def fuse(indices: Sequence[int], sizes: Sequence[int], limit: int, alone: Collection[int] = ()) -> list[list[int]]:
    """Groups consecutive tensors into buckets of at most `limit` bytes (one larger tensor is a bucket of its own).

    Args:
      indices: Which tensors.
      sizes: Elements of every tensor.
      limit: Bytes of float32 in a bucket.
      alone: Tensors that share a bucket with no other.
    """
    buckets: list[list[int]] = [[]]
    filled = 0
    for index in indices:
        size = 4 * sizes[index]
        apart = index in alone or (bool(buckets[-1]) and buckets[-1][-1] in alone)
        if buckets[-1] and (apart or filled + size > limit):
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


def choose(spec: Spec, elements: Sequence[int], group: Group, device: str) -> Plan:
    """Measures links and codecs, and takes for each bucket what should be fastest; about a second.

    All workers must call it together.

    Args:
      spec: An `auto` exchange, with its error budget.
      elements: Of each bucket.
      group: All workers.
      device: Where exchanges run.
    """
    named = [specs.parse(name) for name in _CANDIDATES]
    codecs = [candidate.codec for candidate in named if candidate.codec is not None]
    measured = measure.measure(group, codecs, device)
    names = [candidate.name for candidate in named if candidate.codec is not None]
    known = dict(zip(names, zip(measured.speeds, measured.errors, strict=True), strict=True))
    allowed = [one for one in named if one.codec is None or known[one.name][1] <= spec.max_error]
    variants = [
        dataclasses.replace(
            one,
            text=one.name,
            pattern=pattern,
            error_feedback=spec.error_feedback,
            warmup_steps=spec.warmup_steps,
            min_elements=spec.min_elements,
        )
        for one in allowed
        for pattern in (_PATTERNS if one.codec else _PATTERNS[:1])
        if one.codec is None or can_sum(pattern, group.size, device)
    ]
    chosen: list[Spec] = []
    rows = []
    for number, count in enumerate(elements):
        predicted = {
            variant: cost_model.predict(
                variant, count, group.size, measured.link, known[variant.name][0] if variant.codec else None
            )
            for variant in variants
        }
        best = min(predicted, key=lambda variant: predicted[variant].seconds * _HANDICAP.get(variant.pattern, 1.0))
        chosen.append(best)
        rows.append((number, count, best, predicted[best], predicted[variants[0]]))
    return Plan(chosen, _table(measured, allowed, known, rows))


def _table(
    measured: measure.Measured,
    allowed: Sequence[Spec],
    known: dict[str, tuple[cost_model.Speed, float]],
    rows: Sequence[tuple[int, int, Spec, Cost, Cost]],
) -> str:
    link = measured.link
    lines = [
        f"exchange auto: {link.latency * 1e3:.2f} ms a message, {link.bandwidth * 8e-9:.2f} Gbit/s; "
        "encoding, decoding in GB/s of gradient, relative error:"
    ]
    lines.append(
        "  "
        + ", ".join(
            f"{name} {speed.encode / 1e9:.1f}, {speed.decode / 1e9:.1f}, {error:.2g}"
            f"{'' if any(one.name == name for one in allowed) else ' (over the budget)'}"
            for name, (speed, error) in known.items()
        )
    )
    lines += [
        f"  bucket {number}: {count:,} elements: {best.name}{f' ({best.pattern})' if best.codec else ''}, predicted "
        f"{cost.seconds * 1e3:.1f} ms, dense {dense.seconds * 1e3:.1f} ms"
        for number, count, best, cost, dense in rows
    ]
    return "\n".join(lines)
