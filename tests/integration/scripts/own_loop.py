"""The training loop of docs/exchange.md, on the replicas of a strategy.

python -m tests.integration.scripts.own_loop OUTPUT_DIR

One of several workers; writes the weights to `OUTPUT_DIR/WORKER.npz`.
"""

from __future__ import annotations

import linecache
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import tfpar
from tests.docs import markdown

import keras
import numpy as np
import tensorflow as tf

STEPS, EXAMPLES, FEATURES = 4, 8, 40


def make_step(spec: str) -> Callable[..., Any]:
    """The function of the page, with this exchange."""
    [block] = [each for each in markdown.blocks(markdown.ROOT / "docs" / "exchange.md") if "make_step" in each.text]
    assert block.text.count('"int4"') == 1
    text, name = block.text.replace('"int4"', repr(spec)), "loop of docs/exchange.md"
    # AutoGraph reads the source, and looks for the module.
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, name, "exec"), names)
    return names["make_step"]


def trained(strategy: tf.distribute.Strategy, spec: str) -> list[np.ndarray]:
    """The weights of this worker's last replica after some steps, in each of which the replicas share the examples."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(30, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)
    step = make_step(spec)(model, optimizer, keras.losses.mean_squared_error, strategy)
    for number in range(STEPS):
        x = np.random.default_rng(number).normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
        step(*(_dealt_out(strategy, values) for values in (x, x[:, :1])))
    local = strategy.experimental_local_results
    return [local(variable.value)[-1].numpy() for variable in [*model.variables, *optimizer.variables]]


def _dealt_out(strategy: tf.distribute.Strategy, values: np.ndarray) -> Any:
    replicas = strategy.num_replicas_in_sync
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group :: replicas])
    )


def main(directory: str) -> None:
    runtime = tfpar.initialize(tfpar.ExperimentConfig.from_flat_dict({"strategy": "multi_worker"}))
    path = pathlib.Path(directory) / f"{runtime.topology.worker}.npz"
    np.savez(path, *trained(runtime.strategy, "none"))


if __name__ == "__main__":
    main(*sys.argv[1:])
