"""`auto`: measures links and codecs, and chooses the algorithm that should be fastest for each bucket."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfpar.collectives.cost_model import Cost, Link, Speed
from tfpar.collectives.group import Group
from tfpar.exchange import registry
from tfpar.exchange.buckets import Bucket
from tfpar.exchange.options import Options, is_number, option
from tfpar.exchange.registry import Spec, TuningResult, register
from tfpar.exchange.tuning import measure

import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoOptions(Options):
    """Options of `auto`.

    Attributes:
      max_error: Codecs with a larger relative L2 error on normally distributed numbers are not considered. topk and
        powersgd are never considered: they leave out most of a gradient in every step, which this error does not
        measure.
    """

    max_error: float = option(
        0.05,
        "Codecs with a larger relative L2 error on normally distributed numbers are not considered.",
        allowed="a number of at least 0",
        is_valid=lambda value: is_number(value) and value >= 0.0,
    )

    @property
    def description(self) -> str:
        """The candidates, in a few words."""
        return f"errors up to {self.max_error:g}"


@dataclasses.dataclass(frozen=True)
class _Prediction:
    """The prediction for one bucket: its elements, the choice, and the expected costs of the choice and of the dense
    exchange."""

    elements: int
    chosen: Spec
    cost: Cost
    dense: Cost


@dataclasses.dataclass(frozen=True)
class _Tuning:
    """What was measured, by the name of the algorithm that encodes."""

    measured: measure.Measured
    speeds: dict[str, Speed]
    errors: dict[str, float]


def measure_codecs(spec: Spec, group: Group, device: str) -> _Tuning:
    """Measures links and the codecs of all candidates; takes about a second.

    All workers must call it together.

    Args:
      spec: An `auto` exchange.
      group: All workers.
      device: Where exchanges run.
    """
    codecs = {one.name: one.options.codec for one in _candidates(spec.options, group) if one.options.codec}
    measured = measure.measure(group, list(codecs.values()), device)
    return _Tuning(
        measured,
        speeds=dict(zip(codecs, measured.speeds, strict=True)),
        errors=dict(zip(codecs, measured.errors, strict=True)),
    )


def choose(spec: Spec, elements: Sequence[int], group: Group, tuning: _Tuning) -> TuningResult:
    """Chooses what should be fastest for each bucket.

    Args:
      spec: An `auto` exchange, with its error budget.
      elements: Elements of each bucket.
      group: The workers that exchange.
      tuning: From `measure_codecs`.
    """
    measured, speeds, errors = tuning.measured, tuning.speeds, tuning.errors
    known = [one for one in _candidates(spec.options, group) if one.name in errors or not one.options.codec]
    allowed = [one for one in known if errors.get(one.name, 0.0) <= spec.options.max_error]
    predictions, seconds = [], list[dict[Spec, float]]()
    for count in elements:
        # While one bucket is on the link, the processors work on the others: each is a piece of the exchange.
        costs = {
            candidate: _among(
                len(elements),
                candidate.cost(count, group.size, measured.link, speeds.get(candidate.name, measured.copying)),
            )
            for candidate in allowed
        }
        seconds.append({candidate: cost.seconds * candidate.options.penalty for candidate, cost in costs.items()})
        best = min(seconds[-1], key=seconds[-1].__getitem__)
        dense = registry.get(registry.DENSE).cost(spec.options, count, group.size, measured.link, measured.copying)
        dense = _among(len(elements), dense)
        predictions.append(_Prediction(count, best, costs[best], dense))
    table = _table(tuning, spec.options.max_error, predictions)

    def total(plan: Sequence[Spec]) -> float:
        # An exchange whose error is now over the budget is no longer among the candidates.
        return sum(of_bucket.get(one, math.inf) for one, of_bucket in zip(plan, seconds, strict=True))

    return TuningResult([prediction.chosen for prediction in predictions], table, total)


def _among(buckets: int, cost: Cost) -> Cost:
    """The cost of one of so many buckets that are exchanged at a time."""
    return dataclasses.replace(cost, pieces=cost.pieces * buckets)


def _candidates(options: AutoOptions, group: Group) -> list[Spec]:
    """Every algorithm and pattern that may be chosen, the dense one first: it wins ties."""
    common = {
        "error_feedback": options.error_feedback,
        "warmup_steps": options.warmup_steps,
        "min_elements": options.min_elements,
    }
    candidates = [
        Spec(name, algorithm, candidate)
        for name, algorithm in ((name, registry.get(name)) for name in registry.names())
        for candidate in algorithm.candidates(common, group)
    ]
    return sorted(candidates, key=lambda candidate: candidate.compresses)


def _table(tuning: _Tuning, max_error: float, predictions: list[_Prediction]) -> str:
    measured, errors = tuning.measured, tuning.errors
    link = measured.link
    lines = [
        f"exchange auto: {link.latency * 1e3:.2f} ms a message, {link.bandwidth * 8e-9:.2f} Gbit/s, for which the "
        f"processors take {link.handling * link.bandwidth:.0%} of the time; sums {measured.copying.decode / 1e9:.1f} "
        "GB/s; encoding, decoding in GB/s of gradient, relative error:"
    ]
    lines.append(
        "  "
        + ", ".join(
            f"{name} {1e-9 / speed.encoding(1):.1f}, {1e-9 / speed.decoding(1):.1f}, {errors[name]:.2g}"
            f"{' (over the budget)' if errors[name] > max_error else ''}"
            for name, speed in tuning.speeds.items()
        )
    )
    for number, prediction in enumerate(predictions):
        chosen = prediction.chosen
        pattern = f" ({chosen.options.pattern_name})" if chosen.compresses else ""
        lines.append(
            f"  bucket {number}: {prediction.elements:,} elements: {chosen.name}{pattern}, predicted "
            f"{prediction.cost.seconds * 1e3:.1f} ms, dense {prediction.dense.seconds * 1e3:.1f} ms"
        )
    return "\n".join(lines)


def _build(options: AutoOptions, shapes: Sequence[tf.TensorShape], group: Group, seed: int, name: str) -> Bucket:
    raise TypeError("auto has no buckets of its own: `choose` names the algorithm of each")


def _cost(options: AutoOptions, elements: int, workers: int, link: Link, speed: Speed) -> Cost:
    raise TypeError("auto has no cost of its own: `choose` names the algorithm of each bucket")


register(
    "auto",
    AutoOptions,
    _build,
    cost=_cost,
    measure=measure_codecs,
    choose=choose,
    summary="measures links and codecs at the start, and chooses the fastest by prediction",
    example="max_error=0.2",
)
