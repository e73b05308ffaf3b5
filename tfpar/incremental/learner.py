"""`IncrementalLearner`: learns one task after the other, each as a separate run that can be resumed.

```
WORKDIR/task-01/     the run of the first task: checkpoints, TensorBoard events, summary.json, model.keras
WORKDIR/task-01/task.json   accuracies on all tasks so far; written last, so it marks the task as learned
WORKDIR/task-01/generators.json   the random generators after the task, from which the next model is initialised
WORKDIR/summary.json        the accuracy matrix and its figures
```

A program that is started again skips the learned tasks, and resumes the one in progress.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from tfpar.checkpoint.model_files import load_model
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.guards import bad_examples
from tfpar.incremental import generators
from tfpar.incremental.checks import check, incremental_of
from tfpar.incremental.consolidation import Consolidation, fisher_information
from tfpar.incremental.distillation import DistillationLoss, accuracy_beside_logits, with_logits
from tfpar.incremental.replay import kept_examples, room_for, with_replay
from tfpar.incremental.report import Report, write_json
from tfpar.incremental.tasks import Task, chosen, labels_of, split_tasks, with_classes
from tfpar.inputs.bad_records import fetch_with_mask
from tfpar.inputs.source import Source
from tfpar.monitor.summary import MODEL
from tfpar.optim.keras_calls import finalize_states
from tfpar.parallel.strategies import Runtime
from tfpar.training.trainer import Trainer

import keras
import numpy as np
import tensorflow as tf

Build = Callable[[int], keras.Model]
_DONE = "task.json"
_GENERATORS = "generators.json"
_LENGTH = ("epochs", "steps")  # a single run may be made longer, but the tasks of a series are all of the same length
_SAME_MODEL = (
    "Only the last dim of a weight can grow, with the number of classes. Build the same model for every task, or give "
    "another --workdir."
)
_BATCH = 256  # examples per batch when an earlier model computes logits


class IncrementalLearner:
    """Learns tasks one after the other, see `--tasks` and `--method`.

    Args:
      build: `(classes) -> model`: builds a classifier that returns logits; called for every task, under the strategy.
      train: Training examples of all tasks.
      validation: Validation examples of all tasks; used by `--tasks=by_class:N` (see `split_tasks`).
      config: The whole configuration, with a section `incremental`; `--epochs` or `--steps` is the length of one task.
      runtime: The result of `tfpar.initialize`.

    Attributes:
      tasks: The tasks, in order.
      matrix: Accuracies `[T, T]`: row t has the accuracies on each task after learning task t; NaN for later tasks.

    Raises:
      ConfigError: An option that does not work with incremental learning; the message says what to do instead.
    """

    def __init__(
        self, build: Build, train: Source, validation: Source, *, config: ExperimentConfig, runtime: Runtime
    ) -> None:
        self._options = incremental_of(config)
        if self._options.watch:
            raise ConfigError(
                f"--watch={self._options.watch}: IncrementalLearner learns tasks. Use tfpar.incremental.OnlineLearner, "
                "or leave it out."
            )
        check(config, runtime.topology)
        self._build, self._train, self._validation = build, train, validation
        self._config, self._runtime = config, runtime
        self.tasks: list[Task] = split_tasks(
            self._options, train, validation, validation_fraction=config.input.validation_fraction
        )
        self.matrix: np.ndarray = np.full([len(self.tasks)] * 2, np.nan)
        self._labels = labels_of(train)
        self._room = room_for(train, self._options.replay_examples, self._options.replay_bytes)
        self._report = Report(self.tasks, config, is_chief=runtime.topology.is_chief)
        self._workdir = pathlib.Path(config.checkpoint.workdir) if config.checkpoint.workdir else None
        self._earlier: list[np.ndarray] = []  # weights after the last task, see `weights_of`
        self._digest = ""  # digest of these weights
        self._consolidation = Consolidation([], [])

    def learn(self) -> dict[str, Any]:
        """Learns all tasks.

        Returns:
          The contents of the workdir's `summary.json`: `method`, `tasks`, `matrix`, `average_accuracy`, `forgetting`,
          `backward_transfer` (see `results.figures_of`), and `params_sha256` of the last model. Empty if `--stop_after`
          ended the run of a task.
        """
        done = self._learned_before()
        for number, task in enumerate(self.tasks):
            if number < done:
                self._digest = self._take_up(number)
                continue
            self._report.begin(number, f", {len(task.indices):,} examples, --method={self._options.method}")
            self._digest = self._learn_task(number)
            if not self._digest:
                goes_on = "the next start continues with it" if self._workdir else "without --workdir, nothing is kept"
                self._report.say(f"stopped in task {number + 1} by --stop_after; {goes_on}")
                return {}
            if number + 1 < len(self.tasks):  # the last table is part of the results
                self._report.show(self.matrix, number + 1)
        last = self._directory(len(self.tasks) - 1)
        return self._report.finish(self.matrix, self._digest, last and last / MODEL)

    def _learn_task(self, number: int) -> str:
        """Learns a task and evaluates on all tasks so far; returns the digest of the weights, empty if stopped."""
        task, options = self.tasks[number], self._options
        teaches = options.method == "lwf" and number > 0
        logits = self._teacher(number) if teaches else None
        trainer = Trainer(
            lambda: self._model(number),
            loss=DistillationLoss(options.lwf_strength, options.lwf_temperature)
            if teaches
            else keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[accuracy_beside_logits() if teaches else keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            config=self._config_of(number),
            runtime=self._runtime,
        )
        own, validation = self._examples(number), self._held_out(task, number)
        if logits is not None:
            own, validation = (with_logits(each, logits(each), self._digest) for each in (own, validation))
            classes = own.info.label_spec.shape[0] - 1  # of the earlier model
        summary = trainer.fit(own, validation=validation)
        if not summary.finished:
            return ""
        for place in range(number + 1):
            held_out = self._held_out(self.tasks[place], number)
            if logits is not None:  # the metric reads only the class
                held_out = with_logits(held_out, np.zeros([held_out.info.num_examples, classes], np.float32), "none")
            self.matrix[number, place] = trainer.evaluate(held_out)["accuracy"]
        self._earlier = weights_of(trainer)
        if options.method == "ewc":
            self._consolidate(number)
        digest = str(summary["params_sha256"])
        self._write(number, digest)
        return digest

    def _model(self, number: int) -> keras.Model:
        """Builds the model of a task, with the weights of the previous task."""
        model = self._build(self._classes(number))
        if self._earlier:
            carry_over(model, self._earlier)
        if self._options.method == "ewc":
            self._consolidation.hold(model, self._options.ewc_strength)
        return model

    def _classes(self, number: int) -> int:
        """Returns the number of outputs of a task's model."""
        if not self._options.grow_head:
            return self._train.info.num_classes
        return 1 + max(label for task in self.tasks[: number + 1] for label in task.classes)

    def _held_out(self, task: Task, number: int) -> Source:
        """Returns the examples on which a task is evaluated, for the model of task `number`."""
        source = self._validation
        if task.own:
            info = dataclasses.replace(self._train.info, split="validation")
            source = dataclasses.replace(self._train, info=info)
        return with_classes(chosen(source, task.validation, task.name), self._classes(number))

    def _examples(self, number: int) -> Source:
        """Returns the training examples of a task, as its method needs them."""
        return with_classes(self._examples_of(number), self._classes(number))

    def _examples_of(self, number: int) -> Source:
        task, earlier, options = self.tasks[number], self.tasks[:number], self._options
        if options.method == "joint":
            every = np.concatenate([each.indices for each in self.tasks[: number + 1]])
            return chosen(self._train, np.sort(every), f"{task.name}, and all before")
        if options.method != "replay" or not earlier:
            return chosen(self._train, task.indices, task.name)
        kept = kept_examples(
            earlier, self._labels, self._room, policy=options.replay_policy, seed=self._config.train.seed
        )
        return with_replay(self._train, task, kept)

    def _teacher(self, number: int) -> Callable[[Source], np.ndarray]:
        """Returns a function that computes the logits of the previous task's model for the examples of a source."""
        model = self._alone(number - 1)
        call = tf.function(lambda x: model(x, training=False), autograph=False, reduce_retracing=True)
        call._omit_frequent_tracing_warning = True  # one per task; see `TrainStep`

        def logits(source: Source) -> np.ndarray:
            count = source.info.num_examples
            parts = []
            for start in range(0, count, _BATCH):
                chunk = range(start, min(start + _BATCH, count))
                places = tf.range(chunk.start, chunk.stop, dtype=tf.int64)
                with bad_examples.named(source, functools.partial(np.array, chunk)):
                    x = fetch_with_mask(source, places)[0] if source.skip else source.fetch(places)[0]
                parts.append(call(x).numpy())
            return np.concatenate(parts).astype(np.float32)

        return logits

    def _alone(self, number: int) -> keras.Model:
        """Builds the model after a task, outside the strategy."""
        model = self._build(self._classes(number))
        carry_over(model, self._earlier)
        return model

    def _consolidate(self, number: int) -> None:
        """Adds the task's Fisher information to the penalty."""
        model, task, seed = self._alone(number), self.tasks[number], self._config.train.seed
        count = min(self._options.fisher_examples, len(task.indices))
        drawn = np.random.default_rng([seed & 0xFFFFFFFF, number]).permutation(task.indices)[:count]
        information = fisher_information(model, self._train, drawn, seed=seed)
        weights = [np.asarray(variable) for variable in model.trainable_variables]
        self._consolidation = self._consolidation.with_task(information, weights)

    # Files in the workdir.

    def _directory(self, number: int) -> pathlib.Path | None:
        return self._workdir / f"task-{number + 1:02d}" if self._workdir else None

    def _config_of(self, number: int) -> ExperimentConfig:
        """Returns the configuration of a task's run."""
        directory = self._directory(number)
        checkpoint = dataclasses.replace(self._config.checkpoint, workdir=str(directory or ""))
        return dataclasses.replace(self._config, checkpoint=checkpoint)

    def _write(self, number: int, digest: str) -> None:
        """Records, atomically, that a task is learned, if its model is there: a start that skips the task reads it."""
        directory = self._directory(number)
        if directory is None or not self._runtime.topology.is_chief or not (directory / MODEL).exists():
            return
        if self._options.method == "ewc":
            self._consolidation.save(directory / "consolidation.safetensors")
        generators.save(directory / _GENERATORS)
        accuracies = self.matrix[number, : number + 1].tolist()
        done = {"name": self.tasks[number].name, "accuracies": accuracies, "digest": digest}
        write_json(directory / _DONE, {"options": self._config.as_flat_dict(), **done})

    def _learned_before(self) -> int:
        """Returns the number of tasks that earlier starts have learned, according to the chief.

        Raises:
          ConfigError: The tasks were learned with other options.
        """
        count, problem = 0, ""
        for number in range(len(self.tasks)):
            directory = self._directory(number)
            if directory is None or not (directory / _DONE).exists():
                break
            saved = json.loads((directory / _DONE).read_text())["options"]
            if other := self._config.differences(saved, fixed=_LENGTH):
                problem = (
                    f"--workdir={self._workdir} holds tasks that were learned with another configuration, and all "
                    f"tasks must have the same. Differences (saved -> now): {other}. Give the saved values to continue "
                    "with the next task, or another --workdir to start from the first."
                )
                break
            count += 1
        count, problem = self._of_chief([count, problem])
        if problem:
            raise ConfigError(problem)
        return int(count)

    def _of_chief(self, value: Any) -> Any:
        """Returns the chief's value on every worker."""
        topology = self._runtime.topology
        return WorkerAgreement(world_group(topology.workers, topology.worker)).gather(value)[0]

    def _take_up(self, number: int) -> str:
        """Restores the results of a learned task; returns the digest of its weights."""
        directory = self._directory(number)
        assert directory is not None
        saved = json.loads((directory / _DONE).read_text())
        self.matrix[number, : number + 1] = saved["accuracies"]
        self._report.begin(number, ": learned already")
        self._earlier = [np.asarray(weight) for weight in load_model(str(directory / MODEL)).weights]
        if self._options.method == "ewc":
            self._consolidation = Consolidation.load(directory / "consolidation.safetensors")
        generators.restore(directory / _GENERATORS)  # last, because loading a model draws numbers
        return str(saved["digest"])


def weights_of(trainer: Trainer) -> list[np.ndarray]:
    """Returns the weights that a task has been evaluated with, and that `model.keras` has: with `--ema` the averages,
    which a start that skips the task reads."""
    program, model = trainer.program, trainer.model
    with program.averages.shown():
        averaged = dict(zip(map(id, model.trainable_variables), program.eval_weights(), strict=True))
        weights = [averaged.get(id(weight), weight) for weight in model.weights]
        return [np.asarray(each) for each in program.first_copies(weights)]


def carry_over(model: keras.Model, weights: Sequence[np.ndarray]) -> None:
    """Copies the weights of an earlier model, which may have fewer outputs, to a model.

    Args:
      model: The later model. Additional entries in the last dim of a weight keep their initial values.
      weights: Weights of the earlier model, in the same order.

    Raises:
      ConfigError: The number of weights differs, or the shapes of a weight differ in another way.
    """
    if len(model.weights) != len(weights):
        raise ConfigError(
            f"build: the model of a task has {len(model.weights)} weights, and that of the task before had "
            f"{len(weights)}. {_SAME_MODEL}"
        )
    for variable, earlier in zip(model.weights, weights, strict=True):
        shape = tuple(variable.shape)
        if shape[:-1] != earlier.shape[:-1] or (shape and shape[-1] < earlier.shape[-1]):
            raise ConfigError(
                f"build: the weight {variable.path} of a task's model has shape {shape}, and that of the task before "
                f"had {earlier.shape}. {_SAME_MODEL}"
            )
        if shape == earlier.shape:
            variable.assign(earlier)
        else:
            grown = np.array(variable)
            grown[..., : earlier.shape[-1]] = earlier
            variable.assign(grown)
    finalize_states(model)
