"""The contents of TensorBoard: names, groups and descriptions of the charts, and the layout of the tab CUSTOM SCALARS.

TensorBoard sorts groups by their first letters, and nothing else decides their order. The names are chosen so that
loss, metrics and time come first, then what the optimizer does, then the exchange.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalar

# Scalars with a place of their own; all others are metrics.
TAGS = {
    "learning_rate": "training/learning_rate",
    "gradient_norm": "training/gradient_norm",
    "parameter_norm": "training/parameter_norm",
    "update_norm": "training/update_norm",
    "loss_scale": "training/loss_scale",
    "skipped_steps": "training/skipped_steps",
    "skipped_examples": "training/skipped_examples",
    "residual_over_gradient": "worker_exchange/residual_over_gradient",
    "cosine": "worker_exchange/cosine_to_dense",
    "worker_drift": "rounds/worker_drift",
    "outer_movement": "rounds/movement_norm",
    "outer_update": "rounds/update_norm",
    "round_bytes": "rounds/wire_bytes",
    "clients": "clients/taking_part",
    "dropped_clients": "clients/dropped_out",
    "epsilon": "clients/epsilon",
    "bytes_up": "clients/bytes_up",
    "bytes_down": "clients/bytes_down",
}
# The group of charts of single fragments of a model, `rounds_by_fragment/NUMBER/CHART`.
BY_FRAGMENT = "rounds_by_fragment/"
# Counts, which are of interest once there is something to count.
COUNTS = ("skipped_steps", "skipped_examples")
# Parts of a step's time, in their order, and where each one's share ends when they are stacked.
PARTS = ("input_wait", "compute", "exchange", "update")
_STACK = [f"time_stacked/{place}_{name}" for place, name in enumerate(("start", *PARTS))]
SLOWEST, FASTEST = "time_workers/slowest_ms", "time_workers/fastest_ms"

# Names in summary.json, and of charts in `time/`, of paces that do not count examples.
PACES = {"env steps/s": "env_steps_per_second"}

# Charts of the figures of summary.json that are recorded at the end of a run.
FINAL = {
    "train_loss": "training/final_loss",
    "mfu": "time/final_mfu",
    "examples_per_second": "time/final_examples_per_second",
}

_DESCRIPTIONS = {
    "loss": "Mean loss over the examples of all steps since the previous point. Run `eval`: over the validation set.",
    "time/step_ms": "Mean milliseconds per step: the sum of input wait, compute, exchange and update.",
    "time/input_wait_ms": "Mean milliseconds per step in which the first worker waits for its next batch.",
    "time/compute_ms": "Mean milliseconds per step of forward and backward pass.",
    "time/exchange_ms": "Mean milliseconds per step in which only the exchange of gradients is in progress. It "
    "includes waiting for slower workers.",
    "time/update_ms": "Mean milliseconds per step of the optimizer's update.",
    "time/exchange_overlapped_ms": "Mean milliseconds per step in which some gradients travel while others are still "
    "computed; part of `compute`.",
    "time/examples_per_second": "Examples per second over all replicas, without evaluations and checkpoints.",
    "time/env_steps_per_second": "Steps of all environments per second, learning included.",
    "time/mfu": "Model FLOPs utilisation: FLOPs of the model relative to the peak of the devices.",
    SLOWEST: "Mean milliseconds per step that the slowest worker needs without the exchange. The other workers wait "
    "for it in the exchange.",
    FASTEST: "Mean milliseconds per step that the fastest worker needs without the exchange.",
    "time_workers/slowest_rank": "Rank of the slowest worker.",
    "time_workers/fastest_rank": "Rank of the fastest worker.",
    "time/final_examples_per_second": "Examples per second over the whole run, as in summary.json.",
    "time/final_mfu": "Model FLOPs utilisation over the whole run, as in summary.json.",
    "training/learning_rate": "Learning rate of the last step.",
    "training/gradient_norm": "L2 norm of the mean gradient of the last step, before clipping.",
    "training/parameter_norm": "L2 norm of all trainable weights after the last step.",
    "training/update_norm": "L2 norm of the change that the last step made to the trainable weights.",
    "training/loss_scale": "Loss scale of mixed_float16 after the last step.",
    "training/skipped_steps": "Steps skipped so far because loss or gradients were not finite.",
    "training/skipped_examples": "Training examples left out so far.",
    "training/final_loss": "Mean training loss of the last epoch, as in summary.json.",
    "worker_exchange/residual_over_gradient": "Norm of the residual, which error feedback adds to the next "
    "exchange, relative to the norm of the gradient; of the last exchange that measured it, every eighth.",
    "worker_exchange/cosine_to_dense": "Cosine between the exchanged gradient and the exact mean: 1 is no error.",
    "rounds/worker_drift": "Root mean square of the workers' distances from their mean, L2, at the end of the last "
    "round of local steps.",
    "rounds/movement_norm": "L2 norm of the mean of what the workers have moved in the last round.",
    "rounds/update_norm": "L2 norm of the change that the outer optimizer made of it.",
    "rounds/wire_bytes": "Bytes that each worker sends in the exchange of a round; with a codec, the mean so far.",
    "clients/taking_part": "Clients that the last round was averaged over.",
    "clients/dropped_out": "Clients that were drawn for the last round and did not answer.",
    "clients/epsilon": "Epsilon of (epsilon, delta)-differential privacy of a client, of all rounds so far.",
    "clients/bytes_up": "Bytes that the clients of the last round have sent.",
    "clients/bytes_down": "Bytes that they have received.",
    "clients/accuracy": "Accuracy on the examples of each client: how many clients have which.",
    "validation/predictions": "The first validation examples with label and prediction; wrong predictions are red.",
    "validation/confusion_matrix": "Validation examples by class (rows) and prediction (columns), in percent of the "
    "row.",
    "training/inputs": "The first training examples with their labels, before augmentation.",
}


def tag(name: str) -> str:
    """The chart of a scalar: its place of its own, or among the metrics; a name with a group of ours is a chart."""
    return name if name.startswith(BY_FRAGMENT) else TAGS.get(name, f"metrics/{name}")


def of_metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """The charts of metrics, also of those with the name of another scalar; the loss is none of them."""
    return {f"metrics/{name}": value for name, value in by_element(results).items() if name != "loss"}


def description(tag: str) -> str:
    """What a chart shows, in markdown."""
    if tag in _DESCRIPTIONS:
        return _DESCRIPTIONS[tag]
    group, _, name = tag.partition("/")
    if tag.startswith(BY_FRAGMENT):
        number, _, chart = name.partition("/")
        return f"Of fragment {number} of the model. {_DESCRIPTIONS.get(f'rounds/{chart}', '')}".strip()
    if group == "metrics":
        return f"`{name}` over all examples since the previous point. Run `eval`: over the validation set."
    if tag in _STACK:
        return (
            "Milliseconds per step up to the end of this part, so that the parts are stacked in the tab CUSTOM SCALARS."
        )
    return {
        "weights": f"Values of the weight `{name}`.",
        "weight_updates": f"Change of the weight `{name}` in the step.",
    }.get(group, "")


def table() -> str:
    """All charts and what they show, in markdown: TensorBoard 2.21 shows the description of no scalar."""
    return "\n".join(
        ["| chart | shows |", "|---|---|", *(f"| {tag} | {text} |" for tag, text in _DESCRIPTIONS.items())]
    )


def by_element(values: Mapping[str, Any]) -> dict[str, float]:
    """Values as numbers, for charts and tables: an array `name` is `name/0`, `name/1` and so on, in row-major order."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if np.ndim(value):
            numbers |= {f"{name}/{place}": float(number) for place, number in enumerate(np.ravel(value))}
        else:
            numbers[name] = value
    return numbers


def time_values(milliseconds: Mapping[str, float]) -> dict[str, float]:
    """The charts of a step's time.

    Args:
      milliseconds: By `timings.COLUMNS`.
    """
    values = {f"time/{name}_ms": milliseconds[name] for name in PARTS}
    values["time/step_ms"] = milliseconds["total"]
    if milliseconds["overlapped"]:
        values["time/exchange_overlapped_ms"] = milliseconds["overlapped"]
    ends = np.cumsum([0.0, *(milliseconds[name] for name in PARTS)])
    return values | dict(zip(_STACK, ends.tolist(), strict=True))


def worker_values(seconds: Sequence[float], steps: int) -> dict[str, float]:
    """The charts of the slowest and the fastest worker; none where there is one worker, or no time is known.

    Args:
      seconds: Seconds that each worker needed without the exchange, in the order of their ranks.
      steps: For how many steps.
    """
    if len(seconds) < 2 or not steps or not max(seconds) > 0.0 or not math.isfinite(sum(seconds)):
        return {}
    slowest, fastest = int(np.argmax(seconds)), int(np.argmin(seconds))
    return {
        SLOWEST: 1e3 * seconds[slowest] / steps,
        FASTEST: 1e3 * seconds[fastest] / steps,
        "time_workers/slowest_rank": float(slowest),
        "time_workers/fastest_rank": float(fastest),
    }


def layout(workers: int) -> Summary:
    """The tab CUSTOM SCALARS: loss and metrics, the time of a step stacked by part, slowest and fastest worker.

    Args:
      workers: Workers of the run; a single one is not compared.
    """
    bands = [
        layout_pb2.MarginChartContent.Series(value=upper, lower=lower, upper=upper)
        for lower, upper in itertools.pairwise(_STACK)
    ]
    time = [
        layout_pb2.Chart(
            title="milliseconds per step, stacked: input wait, compute, exchange, update",
            margin=layout_pb2.MarginChartContent(series=bands),
        ),
        _lines("examples per second", "time/examples_per_second"),
    ]
    if workers > 1:
        time.append(_lines("slowest and fastest worker, milliseconds per step", SLOWEST, FASTEST))
        time.append(_lines("rank of the slowest and the fastest worker", "time_workers/(slowest|fastest)_rank"))
    learning = [
        _lines("loss", "loss"),
        _lines("metrics", "metrics/.*"),
        _lines("learning rate", "training/learning_rate"),
        _lines("norms", "training/.*_norm"),
    ]
    categories = [
        layout_pb2.Category(title="loss and metrics", chart=learning),
        layout_pb2.Category(title="time", chart=time),
    ]
    if workers > 1:
        exchange = [_lines("exchange", "worker_exchange/.*")]
        categories.append(layout_pb2.Category(title="exchange", chart=exchange))
    return custom_scalar.pb(layout_pb2.Layout(category=categories))


def _lines(title: str, *tags: str) -> layout_pb2.Chart:
    return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[f"^{tag}$" for tag in tags]))
