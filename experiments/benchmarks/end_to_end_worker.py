"""A worker of `experiments.benchmarks.end_to_end`: trains a workload with TensorFlow's strategy or with tfpar.

Requests: `build` with a workload, a contender and a seed; `steps` with how many; `evaluate`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import tfpar
from experiments.benchmarks import fleet
from experiments.benchmarks.loops import FrameworkLoop
from tfpar import inputs, models
from tfpar.config import ExperimentConfig, InputConfig
from tfpar.doctor import describe_machine
from tfpar.parallel.split import whole_elements

import keras
import tensorflow as tf

TENSORFLOW = "tensorflow"
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained; the same for all contenders.

    Attributes:
      model: Name for `tfpar.models.build`.
      overrides: Its arguments.
      data: Fields of `InputConfig`.
      learning_rate: Of Adam.
      classes: Outputs of the model, if more than the data has.
    """

    model: str
    overrides: dict[str, Any]
    data: dict[str, Any]
    learning_rate: float
    classes: int = 0


WORKLOADS = {
    # Group normalisation: the statistics of batch normalisation are each worker's own in one contender and not in the
    # other. Whole batches only, for the same reason.
    "resnet18": Workload(
        "resnet18",
        {"normalization": "group"},
        {"dataset": "digits", "global_batch_size": 128, "remainder": "drop"},
        1e-3,
    ),
    # GPT-2 124M with its own vocabulary, of which the bytes of the text are the first 256.
    "gpt2": Workload(
        "transformer_lm_gpt2",
        {},
        {"dataset": "text", "global_batch_size": 4, "sequence_length": 64, "remainder": "drop"},
        1e-4,
        50257,
    ),
}


class Worker:
    """State between requests."""

    def __init__(self) -> None:
        self._train: Callable[[int], float] = lambda steps: 0.0
        self._model: keras.Model | None = None
        self._held_out: inputs.Source | None = None
        self._batch = 1

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what is asked."""
        return getattr(self, f"_{request.pop('do')}")(**request)

    def _build(self, workload: str, contender: str, seed: int, jit_compile: bool) -> dict[str, Any]:
        """Starts the strategy, makes the model and does the first step, with all that it has to trace and compile."""
        chosen = WORKLOADS[workload]
        self._batch = chosen.data["global_batch_size"]
        build_strategy = tensorflow_contender if contender == TENSORFLOW else functools.partial(_tfpar, contender)
        self._model, self._train, self._held_out = build_strategy(chosen, seed, jit_compile)
        first_loss = self._train(1)
        parameters = whole_elements(self._model.weights)
        return {"machine": describe_machine(), "parameters": parameters, "first_loss": first_loss}

    def _steps(self, steps: int) -> dict[str, Any]:
        began = time.perf_counter()
        loss = self._train(steps)
        return {"seconds": time.perf_counter() - began, "loss": loss}

    def _evaluate(self) -> dict[str, Any]:
        """Share of the held-out examples that are classified right."""
        assert self._held_out is not None
        config = InputConfig(global_batch_size=self._batch)
        right = total = 0.0
        for x, y, weight in inputs.Pipeline(self._held_out, config, training=False).dataset():
            hits = tf.cast(tf.equal(tf.argmax(self._logits(x[0]), -1, y.dtype), y[0]), tf.float32)
            right += float(tf.reduce_sum(hits * weight[0]))
            total += float(tf.reduce_sum(weight[0]))
        return {"accuracy": right / total}

    @functools.cached_property
    def _logits(self) -> Callable[[tf.Tensor], tf.Tensor]:
        assert self._model is not None
        return tf.function(functools.partial(self._model, training=False), reduce_retracing=True)


Contender = tuple[keras.Model, Callable[[int], float], inputs.Source | None]


def _task(workload: Workload, source: inputs.Source) -> models.TaskSpec:
    task = tfpar.task_spec(source)
    return dataclasses.replace(task, num_classes=workload.classes) if workload.classes else task


def tensorflow_contender(workload: Workload, seed: int, jit_compile: bool) -> Contender:
    """MultiWorkerMirroredStrategy as it comes, in the loop that TensorFlow's guide to it shows.

    Forward and backward pass are compiled by XLA where tfpar's are; the optimizer's `apply` sums the gradients.
    """
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    config = InputConfig(**workload.data)
    train, held_out = inputs.build_splits(config, seed)
    pipeline = inputs.Pipeline(
        train, config, replicas=strategy.num_replicas_in_sync, workers=strategy.num_replicas_in_sync, seed=seed
    )
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = models.build(workload.model, _task(workload, train), **workload.overrides)
        optimizer = keras.optimizers.Adam(workload.learning_rate)
        optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=jit_compile)
    def gradients(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))  # Keras 3.15 divides it by the number of replicas
        return loss, tape.gradient(loss, model.trainable_variables)

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss, sums = gradients(x[0], y[0])
        optimizer.apply(sums, model.trainable_variables)
        return loss

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return strategy.run(replica_step, args=(x, y))

    batches = iter(pipeline.dataset(resolver.task_id, 1, 0))

    def steps(count: int) -> float:
        loss = tf.zeros([])
        for _ in range(count):
            x, y, _ = next(batches)
            loss = step(x, y)
        return float(strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None))

    return model, steps, held_out


def _tfpar(contender: str, workload: Workload, seed: int, jit_compile: bool) -> Contender:
    """`tfpar.Trainer` with this exchange, and the options that follow it, each after an `@`."""
    exchange, *others = contender.split("@")
    config = ExperimentConfig.from_flat_dict(
        {
            **workload.data,
            "model": workload.model,
            "strategy": "multi_worker",
            "exchange": exchange,
            "jit_compile": str(jit_compile).lower(),
            "optimizer": "adam",
            "learning_rate": workload.learning_rate,
            "schedule": "constant",
            "steps": 1 << 20,  # as many as are asked for
            "seed": seed,
            **{
                name: int(value) if value.isdigit() else value
                for name, _, value in (each.partition("=") for each in others)
            },
        }
    )
    train, held_out = inputs.build_splits(config.input, seed)
    runtime = tfpar.initialize(config, train, held_out)
    trainer = tfpar.Trainer(
        lambda: models.build(workload.model, _task(workload, train), **workload.overrides),
        loss=LOSS,
        config=config,
        runtime=runtime,
    )
    return trainer.model, FrameworkLoop(trainer, train), held_out


if __name__ == "__main__":
    fleet.explain(__doc__)
    fleet.serve(Worker().handle)
