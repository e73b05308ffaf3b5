"""What workers of a plain Keras script compare before they train: models, optimizers, weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_rates

import keras
import numpy as np


def digest(variables: Sequence[Any]) -> str:
    """SHA-256 over the bytes of variables."""
    sha256 = hashlib.sha256()
    for variable in variables:
        sha256.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return sha256.hexdigest()


def compare(gathered: list[Any]) -> None:
    """Refuses workers that differ in facts or variables, naming them and the first difference."""
    facts, described = zip(*gathered, strict=True)
    for name in dict.fromkeys(name for fact in facts for name in fact):
        values = [fact.get(name) for fact in facts]
        different = [worker for worker, value in enumerate(values) if value != values[0]]
        if different:
            raise ConfigError(
                f"tfpar.DistributedOptimizer: {worker_names(different)} and worker 0 have different values of {name}, "
                f"{values[different[0]]!r} and {values[0]!r}. All workers need the same."
            )
    different = [worker for worker, variables in enumerate(described) if variables != described[0]]
    if different:
        other, own = described[different[0]], described[0]
        index = next((i for i, pair in enumerate(zip(other, own, strict=False)) if pair[0] != pair[1]), None)
        detail = f"{len(other)} and {len(own)} variables" if index is None else f"{other[index]!r} and {own[index]!r}"
        raise ConfigError(
            f"tfpar.DistributedOptimizer: {worker_names(different)} and worker 0 train different models: {detail}. All "
            "workers must build the same model, and must create the same layers before it."
        )


def worker_names(ranks: Sequence[int]) -> str:
    """`worker 1`, `workers 1, 2`."""
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def path_of(variable: Any) -> str:
    """The path of a Keras variable, or the name of another one."""
    return getattr(variable, "path", variable.name)


def describe(optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    """Class and configuration as text, without the names that Keras numbers, and without what variables hold."""
    with keras_rates.without_schedule(getattr(optimizer, "inner_optimizer", optimizer)) as schedule:
        config = keras.optimizers.serialize(optimizer)

    def relevant(value: Any) -> Any:
        if not isinstance(value, dict):
            return [relevant(item) for item in value] if isinstance(value, (list, tuple)) else value
        held = lambda key, item: key == "learning_rate" and isinstance(item, float)  # noqa: E731
        return {key: relevant(item) for key, item in value.items() if key != "name" and not held(key, item)}

    facts = {"optimizer": config["class_name"]} | relevant(config["config"])
    if schedule is not None:
        described = keras_rates.schedule_config(schedule)
        facts["learning_rate"] = relevant(described) or getattr(schedule, "__qualname__", type(schedule).__qualname__)
    return {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in facts.items()}
