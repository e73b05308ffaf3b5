"""Runs on meshes, in one process or on real workers: tests/training/test_tensor_parallel.py and
tests/integration/test_tensor_parallel.py.

python -m tests.integration.scripts.divided OUTPUT CASES

CASES is JSON: a list of options of an experiment, with the name of a model of `MODELS`, each of which is trained in
turn. `OUTPUT/CASE-WORKER.npz` gets the whole weights, `params_sha256`, whether XLA compiled the optimizer step, the
bytes sent per step, the bytes of all messages that were traced, the bytes of the sums of gradients that a pipeline
keeps in shards, the loss of the evaluation and the examples that it left out, with `predicts` the predictions for the
first examples, and this worker's own copies of weights that other workers of its pipeline have too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import tfpar
from tests.integration.scripts import sharded
from tests.integration.scripts.divided_models import MODELS, data, first_of, map_of_backbone
from tests.integration.scripts.sharded import STEPS
from tfpar.collectives.tensorflow import Channel
from tfpar.config import StrategyConfig
from tfpar.parallel import split, strategies
from tfpar.parallel.held import held_by
from tfpar.parallel.split import whole
from tfpar.parallel.topology import choose_topology
from tfpar.training.sharding.pipeline_step import PipelineScatteringStep

import keras
import numpy as np
import tensorflow as tf

PREDICTED = 21
COMMON = {**sharded.COMMON, "optimizer": "adamw", "jit_compile": "false"}


def here(strategy: str = "one_device", mesh: str = "", devices: int = 0, **options: Any) -> tfpar.Trainer:
    """Trains in this process."""
    runtime = runtime_of(strategy, mesh, devices)
    return train({"strategy": strategy, "mesh": mesh, "devices": devices, **options}, runtime)


def made_here(strategy: str, mesh: str, devices: int = 0, model: str = "dense", **options: Any) -> tfpar.Trainer:
    """What `here` trains, before its first step."""
    runtime = runtime_of(strategy, mesh, devices)
    return made(model, {"strategy": strategy, "mesh": mesh, "devices": devices, **options}, runtime)


def runtime_of(strategy: str, mesh: str = "", devices: int = 0) -> tfpar.Runtime:
    return strategies.build(choose_topology(StrategyConfig(strategy=strategy, mesh=mesh, devices=devices)))


def train(options: dict[str, Any], runtime: tfpar.Runtime | None = None) -> tfpar.Trainer:
    """Trains a model on the same examples from the same seed; its last results are `trainer.results`."""
    model, steps = options.pop("model", "dense"), options.pop("steps", STEPS)
    trainer = made(model, options, runtime)
    x, y = data(model)
    trainer.results = trainer.fit(x, y, steps=steps, validation=(first_of(x, 50), first_of(y, 50)))
    return trainer


def made(model: str, options: dict[str, Any], runtime: tfpar.Runtime | None) -> tfpar.Trainer:
    """A trainer of a model of `MODELS`, from the same seed."""
    # The bias of keys has no gradient but rounding, which Adam would make steps of.
    chosen = {} if model == "dense" else {"optimizer": "sgd", "learning_rate": 0.3}
    config = tfpar.ExperimentConfig.from_flat_dict({**COMMON, **chosen, **options})
    if runtime is None:
        runtime = tfpar.initialize(config)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics: Any = ["accuracy"]
    if model == "uneven_vocabulary":  # and some positions do not count
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
        metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy("nats", from_logits=True)]
    if model == "branches":
        loss, metrics = {"kind": loss, "size": "mse"}, {"kind": "accuracy"}
    if model == "ignoring":  # the losses are divided by different numbers
        loss = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1), "size": "mse"}
        metrics = {}
    if model == "unread":
        loss, metrics = {"kind": loss, "size": None}, {}
    if model == "overflowing":
        loss, metrics = "mae", []
    if model == "own_mask":
        loss, metrics = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}, {}
    mesh = config.strategy.mesh
    layout = map_of_backbone(mesh) if model == "grouped_query" and "model" in mesh else None
    return tfpar.Trainer(MODELS[model], loss=loss, metrics=metrics, config=config, runtime=runtime, layout=layout)


def weights_of(trainer: tfpar.Trainer) -> dict[str, np.ndarray]:
    return {variable.path: whole(variable) for variable in trainer.model.variables}


def own_copies(trainer: tfpar.Trainer) -> dict[str, np.ndarray]:
    """Copies of weights that several workers of a pipeline hold, which `weights_of` takes from one of them."""
    held = [(variable, held_by(variable)) for variable in trainer.model.trainable_variables]
    return {
        f"own {each.path}, part {by.layer_peers.rank if by.layer_peers and by.split else 0}": each.numpy()
        for each, by in held
        if by and by.here and len(by.ranks) > 1
    }


def weights_alone_and_on(
    mesh: str, build: Callable[[], keras.Model], x: Any, y: Any, *, steps: int, loss: Any = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The weights after some steps of two micro-batches: on one device, and on a mesh in this process."""

    def trained(strategy: str, mesh: str) -> dict[str, np.ndarray]:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        options = {**COMMON, "strategy": strategy, "mesh": mesh, "accumulate_steps": 2}
        config = tfpar.ExperimentConfig.from_flat_dict(options)
        trainer = tfpar.Trainer(build, loss=loss, config=config, runtime=runtime_of(strategy, mesh))
        trainer.fit(x, y, steps=steps)
        return weights_of(trainer)

    return trained("one_device", ""), trained("mirrored", mesh)


def main(output: str, cases: str) -> None:
    worker = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
    runtime = None
    messages: list[int] = []
    send = Channel.send

    def counted(channel: Channel, value: tf.Tensor, instance: int) -> tf.Tensor:
        messages.append((value.shape.num_elements() or 0) * value.dtype.size)  # rows of tables have no static number
        return send(channel, value, instance)

    sums: list[int] = []
    ends = PipelineScatteringStep._ends_micro_batch

    def kept(step: PipelineScatteringStep, summed: list[tf.Tensor]) -> None:
        sums[:] = [4 * (value.shape.num_elements() or 0) for value in summed]
        ends(step, summed)

    PipelineScatteringStep._ends_micro_batch = kept  # type: ignore[method-assign]
    Channel.send = counted  # type: ignore[method-assign]
    split._BLOCK_BYTES = 1 << 10  # of whole weights that are read: several blocks each
    for number, options in enumerate(json.loads(cases)):
        messages.clear()
        predicts = options.pop("predicts", False)
        model = options.get("model", "dense")
        trainer = train(options, runtime)
        runtime = trainer.runtime
        results = trainer.results
        facts = {"params_sha256": results["params_sha256"], "sent": results["exchange"]["wire_bytes_per_step"]}
        facts |= {"messages": sum(messages), "sums": sum(sums), "compiles_update": trainer.program.compiles_update}
        facts |= {"skipped": results["skipped_validation_examples"], "eval loss": results["eval"]["loss"]}
        if predicts:
            facts["predictions"] = trainer.predict(first_of(data(model)[0], PREDICTED))
        arrays = {**facts, **own_copies(trainer), **weights_of(trainer)}
        np.savez(os.path.join(output, f"{number}-{worker}.npz"), **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
