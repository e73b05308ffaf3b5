"""Callbacks that keep the workers of a plain Keras `fit` together."""

from __future__ import annotations

import math
import threading
from typing import Any

from tfpar.config import ConfigError
from tfpar.drop_in import workers
from tfpar.drop_in.comparing import digest
from tfpar.drop_in.optimizer import distribution_of, xla_error
from tfpar.drop_in.workers import Workers
from tfpar.optim.keras_calls import finalize_states

import keras
import numpy as np


class _InStep(keras.callbacks.Callback):
    """Checks that all workers make the same steps: one that stopped early would leave the others waiting."""

    # Keras then continues without waiting for `on_train_batch_end`, as if there were none.
    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._workers: Workers | None = None
        self._optimizers: list[keras.optimizers.Optimizer] = []
        self._steps: int | None = None
        self._done, self._begun, self._counting = 0, False, threading.Lock()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Compares the steps that workers are going to make.

        Raises:
          ConfigError: They differ, or are not known.
        """
        del logs
        self._workers, self._begun = workers.current(), False
        if self._workers is None:
            return
        self._optimizers = distributed_optimizers(self.model)
        if not self._optimizers:
            raise ConfigError(
                f"tfpar.{type(self).__name__}: the model's optimizer does not exchange gradients, and no attribute of "
                "the model is an optimizer that does, so each worker would train alone. Write "
                "model.compile(tfpar.DistributedOptimizer(optimizer), ...)."
            )
        if self.model.jit_compile:
            raise xla_error()
        self._steps = self.params["steps"]
        plans = self._workers.gather(
            f"{type(self).__name__} begins", [self._steps, self.params["epochs"], self.model.steps_per_execution]
        )
        if any(steps is None for steps, *_ in plans):
            raise ConfigError(
                "fit: the number of steps per epoch is not known on every worker, but all workers must run the same "
                "number. Give fit steps_per_epoch=N and data that repeats (dataset.repeat())."
            )
        if any(plan != plans[0] for plan in plans):
            counts = "; ".join(
                f"worker {worker}: {steps} x {epochs}" + f", {together} per execution" * (together > 1)
                for worker, (steps, epochs, together) in enumerate(plans)
            )
            raise ConfigError(
                "fit: workers would run different numbers of steps and wait for each other forever (steps x epochs: "
                f"{counts}). Use tfpar.shard, or give all the same steps_per_epoch, epochs and batch_size."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of the new epoch, and checks that all workers continue.

        Raises:
          ConfigError: This is the first epoch of `fit`, and it is another one on other workers.
        """
        del logs
        self._done = 0
        if self._begun:
            self._meet(f"begins epoch {epoch + 1}")
        elif self._workers is not None:
            self._begun = True
            _check_same_first_epoch(self._workers.gather(f"{type(self).__name__} begins the first epoch", epoch + 1))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts."""
        del logs
        with self._counting:  # Keras calls this in threads of a pool, of which an earlier one may come later
            self._done = max(self._done, batch + 1)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Refuses an epoch that ended before its time.

        Raises:
          ConfigError: It did, on this worker.
        """
        del logs
        if self._workers is not None and self._steps is not None and self._done < self._steps:
            raise ConfigError(
                f"fit: worker {self._workers.rank} ended epoch {epoch + 1} after {self._done} of {self._steps} steps, "
                "and the others wait for it. Its data ran out (use dataset.repeat()), or a callback stopped the epoch."
            )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that no other worker continues."""
        del logs
        self._meet("ends")

    def _meet(self, where: str) -> None:
        if self._workers is not None:
            self._workers.gather(f"{type(self).__name__} {where}", None)


def distributed_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers of a model that exchange gradients: that of `compile`, and those that the model has as attributes,
    also in lists and dicts, because it trains parts of itself with each, as a GAN does."""
    found: dict[int, keras.optimizers.Optimizer] = {}
    for value in (model.optimizer, *vars(model).values()):
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for part in parts:
            if isinstance(part, keras.optimizers.Optimizer) and distribution_of(part) is not None:
                found[id(part)] = part
    return [*found.values()]


class BroadcastInitialWeights(_InStep):
    """Gives all workers the weights and the optimizer state of worker 0 when training begins.

    Put it first in the callbacks of `fit`, on every worker. Seeds of dropout and the like stay each worker's own.

    Raises:
      ConfigError: In `fit`, on every worker: workers have other models, optimizers or exchanges, or would make another
        number of steps; the train step is under XLA; the optimizer is not a `DistributedOptimizer`.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Compares the workers, copies, and checks the copies."""
        super().on_train_begin(logs)
        if self._workers is None:
            return
        self._build()
        for optimizer in self._optimizers:
            if optimizer.built and (distribution := distribution_of(optimizer)):
                distribution.start(optimizer)
        variables = [*self.model.weights, *(each for one in self._optimizers for each in one.variables)]
        arrays = [variable.numpy() for variable in variables]
        layouts = self._workers.gather(
            "compare shapes before the broadcast", [[list(array.shape), str(array.dtype)] for array in arrays]
        )
        for worker, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise ConfigError(
                    f"tfpar.BroadcastInitialWeights: worker {worker} has {len(layout)} weights and optimizer "
                    f"variables, worker 0 has {len(layouts[0])}, or their shapes differ: the workers build different "
                    "models."
                )
        for variable, value in zip(variables, self._workers.broadcast(arrays), strict=True):
            variable.assign(value)
        finalize_states(self.model)
        digests = self._workers.gather("check the broadcast", digest(variables))
        if any(other != digests[0] for other in digests):
            raise RuntimeError(f"workers hold different weights after the broadcast: SHA-256 {digests}")

    def _build(self) -> None:
        """Builds the optimizer of `compile`. With several, only the first step knows the variables of each."""
        optimizer = self._optimizers[0]
        alone = len(self._optimizers) == 1 and optimizer is self.model.optimizer
        if optimizer.built and alone:
            return
        if not (self.model.built if alone else self.model.weights):
            raise ConfigError(
                "tfpar.BroadcastInitialWeights: the model has no weights yet. Give it a keras.Input, or call it on a "
                "batch before fit."
            )
        if alone:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(self.model.trainable_weights)


class AverageMetrics(_InStep):
    """Makes the logs at the end of an epoch those of all workers.

    Put it before ReduceLROnPlateau, EarlyStopping, ModelCheckpoint and other callbacks that read logs, on every worker:
    all workers then make the same decisions. The states of Keras' metrics, which are sums, are added up over the
    workers, in training and, for `val_...`, in validation: every example and every sample weight counts once, and
    metrics such as AUC or a root of a mean are exact too. Other logged values, such as those of your own metric
    classes or tensors that your own `train_step` returns, are averaged, weighted by the number of examples that each
    worker saw.

    Raises:
      ConfigError: In `fit`, on every worker: workers log different names, or have different learning rates or decisions
        to stop, which happens if this callback does not come before those that decide.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[str, dict[str, Any]] = {}  # of `train` and `validation`

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets the previous epoch."""
        super().on_epoch_begin(epoch, logs)
        self._noted = {}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the metrics of the training epoch after its last batch: an earlier callback may evaluate at its end."""
        super().on_train_batch_end(batch, logs)
        if self._workers is not None and self._steps is not None and batch + 1 >= self._steps:
            # Keras may call this in another thread while validation resets the metrics; then they are noted already.
            self._noted.setdefault("train", self._snapshot())

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the metrics of the training epoch, before validation resets them."""
        del logs
        self._noted["train"] = self._snapshot()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the metrics of the validation."""
        del logs
        self._noted["validation"] = self._snapshot()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the values in `logs`."""
        super().on_epoch_end(epoch, logs)
        if self._workers is None or logs is None:
            return
        gathered = self._workers.gather(
            f"average the metrics of epoch {epoch + 1}",
            {
                "values": _as_lists(logs),
                "train": self._noted["train"],
                "validation": self._noted.get("validation", {"examples": 0.0, "state": [], "results": {}}),
                "learning rate": _current_rates(self._optimizers),
                "stop_training": bool(self.model.stop_training),
            },
        )
        _check_same_decisions(gathered)
        exact = self._exact(gathered)
        for name in logs:
            split = "validation" if name.startswith("val_") else "train"
            weights = [worker[split]["examples"] for worker in gathered]
            parts = np.asarray([worker["values"][name] for worker in gathered])
            means = [weighted_mean(column.tolist(), weights) for column in parts.reshape(len(parts), -1).T]
            mean = np.reshape(means, parts.shape[1:]) if parts.ndim > 1 else means[0]
            logs[name] = exact.get(name, mean)

    def _exact(self, gathered: list[dict[str, Any]]) -> dict[str, Any]:
        """The results of metrics over all workers, by their names in the logs.

        A value that a worker logs under the name of a metric need not be the metric's result: Keras makes a mean `loss`
        for every model, which a `train_step` of the user's own may leave at 0. Such names are left out.
        """
        exact: dict[str, Any] = {}
        for prefix, split in (("", "train"), ("val_", "validation")):
            for name, value in self._results([worker[split]["state"] for worker in gathered]).items():
                logged = [worker["values"].get(prefix + name) for worker in gathered]
                results = [worker[split]["results"].get(name) for worker in gathered]
                if all(map(_is_result, logged, results)):
                    exact[prefix + name] = value
        return exact

    def _snapshot(self) -> dict[str, Any]:
        """The number of examples since the metrics were reset, the state of those that add up, and all results."""
        state = [
            variable.numpy().tolist()
            for metric in self._compiled_metrics(additive=True)
            for variable in metric.variables
        ]
        return {
            "examples": self._examples(),
            "state": state,
            "results": _as_lists(_flat(self.model.get_metrics_result())),
        }

    def _results(self, states: list[list[Any]]) -> dict[str, Any]:
        """Values by name from the sums of the workers' states; the model's metrics are the same afterwards."""
        variables = [variable for metric in self._compiled_metrics(additive=True) for variable in metric.variables]
        if not variables or any(len(state) != len(variables) for state in states):
            return {}
        before = [variable.numpy() for variable in variables]
        try:
            for variable, parts in zip(variables, zip(*states, strict=True), strict=True):
                variable.assign(np.sum([np.asarray(part, np.float64) for part in parts], axis=0))
            results = _flat(self.model.get_metrics_result())
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
        # The same names on every worker, also where a value happens not to change.
        others = self._names_of_others()
        return {
            name: np.asarray(value) if np.ndim(value) else float(value)
            for name, value in results.items()
            if name not in others
        }

    def _names_of_others(self) -> set[str]:
        """The names under which Keras logs metrics that are not known to add up."""
        names: set[str] = set()
        for metric in self.model.metrics:
            result = metric.result()
            named = result if isinstance(result, dict) else {metric.name: result}
            # CompileMetrics (Keras 3.15) holds those of `compile`, adds outputs and numbers to their names, and keeps
            # their order. Other metrics may have several results, too.
            parts = metric.metrics if hasattr(metric, "metrics") else [metric] * len(named)
            known = len(parts) == len(named)  # the number added to a name may make it that of another metric
            for place, (name, value) in enumerate(named.items()):
                if not known or not _adds_up(parts[place]):
                    names.update(_flat({name: value}))
        return names

    def _compiled_metrics(self, *, additive: bool) -> list[keras.metrics.Metric]:
        """The model's metrics, those of `compile` one by one, that are known to add up, or the others."""
        parts = [part for metric in self.model.metrics for part in getattr(metric, "metrics", [metric])]
        unique = {id(part): part for part in parts if part is not None}
        return [part for part in unique.values() if _adds_up(part) is additive]

    def _examples(self) -> float:
        """Examples since the metrics were reset: the count in Keras' mean of the loss, or else the largest count of a
        mean."""
        counts = {
            metric.name: float(keras.ops.convert_to_numpy(metric.count))
            for metric in self._compiled_metrics(additive=True)
            if isinstance(metric, keras.metrics.Mean)
        }
        return (counts.get("loss") or max(counts.values())) if counts else 1.0


def _adds_up(metric: keras.metrics.Metric) -> bool:
    """Whether the state of a metric is a sum over examples: that of all of Keras' own is (3.15)."""
    updates = next(kind for kind in type(metric).__mro__ if "update_state" in vars(kind))
    return updates.__module__.split(".")[0] == "keras"


def _flat(results: dict[str, Any]) -> dict[str, Any]:
    """The results of metrics as Keras logs them: those of a metric with several results are beside the others."""
    flat: dict[str, Any] = {}
    for name, value in results.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def _as_lists(logs: dict[str, Any]) -> dict[str, Any]:
    """Logged values as JSON can hold them."""
    return {name: np.asarray(value, np.float64).tolist() for name, value in logs.items()}


def _is_result(logged: Any, result: Any) -> bool:
    """Whether a logged value is the result of a metric.

    Keras logs the result itself, or that of the last step, whose graph TensorFlow may round differently.
    """
    if logged is None or result is None or np.shape(logged) != np.shape(result):
        return False
    return bool(np.allclose(logged, result, rtol=1e-5, atol=0.0, equal_nan=True))


def weighted_mean(values: list[float], weights: list[float]) -> float:
    """The mean of values by weights, the plain mean where all weights are 0; exactly the value where all are equal."""
    if all(value == values[0] for value in values):
        return values[0]
    total = math.fsum(weights)
    if total == 0.0:
        weights, total = [1.0] * len(values), float(len(values))
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight) / total


def _current_rates(optimizers: list[keras.optimizers.Optimizer]) -> Any:
    """The present learning rate, or those of several optimizers; None for an optimizer that has several (Keras'
    MultiOptimizer refuses to name one)."""
    rates = [getattr(optimizer, "learning_rate", None) for optimizer in optimizers]
    numbers = [None if rate is None else float(keras.ops.convert_to_numpy(rate)) for rate in rates]
    return numbers if len(numbers) > 1 else numbers[0]


def _check_same_first_epoch(epochs: list[int]) -> None:
    """Refuses workers that begin at different epochs, counted from 1."""
    if any(epoch != epochs[0] for epoch in epochs):
        begun = "; ".join(f"worker {worker}: epoch {epoch}" for worker, epoch in enumerate(epochs))
        raise ConfigError(
            f"fit: workers resume at different epochs ({begun}). Give all workers the same initial_epoch, or each a "
            "keras.callbacks.BackupAndRestore with a directory of its own, after tfpar.BroadcastInitialWeights. If the "
            "backups are of different epochs, replace them by copies of one."
        )


def _check_same_decisions(gathered: list[dict[str, Any]]) -> None:
    """Refuses workers that log different metrics, or have made different decisions."""
    names = [sorted(worker["values"]) for worker in gathered]
    for worker, logged in enumerate(names):
        if logged != names[0]:
            raise ConfigError(
                f"tfpar.AverageMetrics: worker {worker} logs {', '.join(logged)}, worker 0 {', '.join(names[0])}. "
                "Compile and validate the same way on all workers."
            )
    for what in ("learning rate", "stop_training"):
        values = [worker[what] for worker in gathered]
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"tfpar.AverageMetrics: workers have different values of {what}, {values}. Put AverageMetrics before "
                "the callbacks that decide (ReduceLROnPlateau, EarlyStopping)."
            )
