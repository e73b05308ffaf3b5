"""`OnlineLearner`: learns from files as they arrive in a directory, each example exactly once.

```
WORKDIR/deliveries.jsonl    the files of each delivery and its steps of the run; written before they are learned
WORKDIR/checkpoints/, ...   one run over all deliveries, with the usual files
WORKDIR/exports/000003/     the model after delivery 3: model.keras and about.json; `newest` links to the last version
```

The newest checkpoint determines the progress of the run, and the journal determines the files of the following steps.
So a start after `kill -9` learns the rest of the deliveries, with the same bits as an uninterrupted run, and then waits
for more files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfpar.checkpoint import format as files
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError, ExperimentConfig, TrainingError
from tfpar.incremental.checks import check, incremental_of, watching
from tfpar.incremental.online.arrivals import form_of
from tfpar.incremental.online.chief import Chief
from tfpar.incremental.online.journal import Delivery
from tfpar.incremental.replay import kept_examples, room_for
from tfpar.incremental.tasks import Task, chosen, joined, labels_of
from tfpar.inputs.source import Source, SourceInfo
from tfpar.monitor.summary import MODEL, command_of, unwritten
from tfpar.parallel.strategies import Runtime
from tfpar.training.loops.hooks import Hook
from tfpar.training.loops.state import LoopState
from tfpar.training.trainer import Trainer

import keras
import numpy as np

_log = logging.getLogger(__name__)

_SHOWN_FROM = 20  # deliveries of at least this many steps show their progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeliveredInfo(SourceInfo):
    """The description of one delivery, in a run that continues over all deliveries."""

    @property
    def fingerprint(self) -> str:
        """A fingerprint that is the same for all deliveries: the journal distinguishes them."""
        whole = dataclasses.replace(self, num_examples=0, files=(), records_per_file=(), digest="")
        return SourceInfo.fingerprint.fget(whole)  # type: ignore[attr-defined]


class OnlineLearner:
    """Learns from the files that arrive in `--watch`.

    Args:
      build: Builds the model, which returns logits; called under the strategy.
      train: Training examples of `--dataset`, in the format of the arriving examples; replay keeps some of them.
      validation: Examples for the evaluation after each delivery, or None.
      config: The whole configuration, with a section `incremental`.
      runtime: The result of `tfpar.initialize`.

    Raises:
      ConfigError: `--watch` is not given, or an option does not work with it; the message says what to do instead.
    """

    def __init__(
        self,
        build: Callable[[], keras.Model],
        train: Source,
        validation: Source | None,
        *,
        config: ExperimentConfig,
        runtime: Runtime,
    ) -> None:
        self._options = incremental_of(config)
        if not self._options.watch:
            raise ConfigError(
                "OnlineLearner learns from files as they arrive: give their directory, --watch. For tasks, use "
                "tfpar.incremental.IncrementalLearner."
            )
        check(config, runtime.topology)
        config = watching(config)
        self._runtime, self._train, self._validation = runtime, train, validation
        topology = runtime.topology
        self._form = form_of(config.input, train.info, self._options.watch)
        self._agreement = WorkerAgreement(world_group(topology.workers, topology.worker))
        self._workdir = config.checkpoint.workdir
        self._shown = topology.is_chief and config.monitor.verbose > 0
        self._batch, self._seed = config.input.global_batch_size, config.train.seed
        self._kept = self._choose_kept()
        self._stop_after = config.train.stop_after
        self._chief = Chief(self._options, self._form, config, self._steps_of) if topology.is_chief else None
        self._trainer = Trainer(
            build,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            config=_quiet(config),
            runtime=runtime,
        )

    def learn(self) -> dict[str, Any]:
        """Learns from unfinished deliveries and from arriving files until the run ends.

        Returns:
          `deliveries`, `examples`, `steps`, `skipped` and `repeated`, each a number over all starts of the run; and the
          results of the last evaluation.

        Raises:
          TrainingError: A checkpoint could not be written; without it, the next start would learn examples twice. Or
            a model that is to be exported could not be written; the next start exports it.
        """
        with self._chief.alone() if self._chief else contextlib.nullcontext():
            return self._finish(self._learn_all())

    def _learn_all(self) -> dict[str, Any]:
        """Returns the summary of the last delivery of this start."""
        position, results = self._position(verify=True), dict[str, Any]()
        self._say(self._welcome(position))
        while True:
            delivery, ends = self._next(position)
            if delivery is None and ends:
                return results
            if delivery is None:
                time.sleep(self._options.watch_every)
                continue
            results = self._learn_delivery(delivery)
            position, before = self._position(), position
            if position < delivery.end:
                if self._stop_after:
                    self._say("stopped by --stop_after; the next start continues in the current delivery")
                    return results
                raise TrainingError(
                    f"the checkpoint after delivery {delivery.number} could not be written: the newest is of step "
                    f"{max(position, before)}. Make room in {self._workdir}, and start again."
                )

    def _learn_delivery(self, delivery: Delivery) -> dict[str, Any]:
        """Learns the rest of a delivery, evaluates, and exports."""
        self._say(
            f"delivery {delivery.number}: {_count(len(delivery.files), 'file')}, "
            f"{_count(delivery.examples, 'example')}, to step {delivery.end}"
        )
        hooks = []
        if delivery.steps >= _SHOWN_FROM:
            hooks.append(Hook(max(1, delivery.steps // 10), lambda state: self._show(delivery, state)))
        source = self._source(delivery)
        summary = self._trainer.fit(source, validation=self._validation, steps=delivery.end, hooks=hooks)
        self._check_written(delivery, summary)
        if self._chief and (version := self._chief.export(delivery, summary)):
            self._say(f"version {delivery.number} of the model: {version}")
        held_out = {f"held-out {name}": value for name, value in (summary["eval"] or {}).items()}
        figures = {"training loss": summary["train_loss"], **held_out}
        self._say("  ".join(f"{name} {value:.4f}" for name, value in figures.items()))
        return dict(summary)

    def _check_written(self, delivery: Delivery, summary: Mapping[str, Any]) -> None:
        """Raises an error if an export is due whose model could not be written: that of an earlier delivery is in its
        place."""
        due = self._chief is not None and self._chief.is_due(delivery)
        problem = self._agreement.gather(unwritten(summary, MODEL) if due else "")[0]
        if problem:
            raise TrainingError(
                f"the model after delivery {delivery.number} could not be written ({problem}), so it is not exported. "
                f"Make room in {self._workdir}, and start again."
            )

    def _show(self, delivery: Delivery, state: LoopState) -> None:
        self._say(f"delivery {delivery.number}: step {state.step} of {delivery.end}")

    def _source(self, delivery: Delivery) -> Source:
        """Returns the examples of a delivery in the order of learning, with as many kept examples."""
        source = self._form.source(self._options.watch, [file.name for file in delivery.files])
        if source.info.num_examples != delivery.examples:
            raise ConfigError(
                f"--watch={self._options.watch}: the files of delivery {delivery.number} had {delivery.examples:,} "
                f"examples and have {source.info.num_examples:,}. Restore the files as they arrived; a file may be "
                "removed only after the export of a model that has learned from it."
            )
        random = np.random.default_rng([self._seed & 0xFFFFFFFF, 29, delivery.number])
        if len(self._kept):
            some = random.choice(self._kept, delivery.examples, replace=delivery.examples > len(self._kept))
            source = joined(source, chosen(self._train, some, "kept"), 1, "and kept examples")
        # The input pipeline must not shuffle: a delivery is not an epoch of the run, so the pipeline would read some
        # examples twice and others not at all.
        order = random.permutation(source.info.num_examples)
        source = chosen(source, order, f"delivery {delivery.number}")
        fields = {field.name: getattr(source.info, field.name) for field in dataclasses.fields(source.info)}
        own = {"may_be_short": True, "first_step": delivery.first_step}
        return dataclasses.replace(source, info=DeliveredInfo(**(fields | own)))

    def _steps_of(self, examples: int) -> int:
        """Returns the number of steps for this number of new examples."""
        return -(-examples * (2 if len(self._kept) else 1) // self._batch)

    def _choose_kept(self) -> np.ndarray:
        """Returns the indices of the examples of `--dataset` to learn again together with new examples."""
        options = self._options
        if options.method != "replay":
            return np.zeros(0, np.int64)
        labels = labels_of(self._train)
        whole = Task(self._train.info.name, np.arange(len(labels)), np.zeros(0, np.int64), ())
        room = room_for(self._train, options.replay_examples, options.replay_bytes)
        return kept_examples([whole], labels, room, policy=options.replay_policy, seed=self._seed)

    # Called by all workers, with the same result.

    def _next(self, position: int) -> tuple[Delivery | None, bool]:
        """Returns the next delivery, if any, and whether the run ends if there is none; the chief decides."""
        found: Any = None
        if self._chief:
            delivery, ends = self._chief.next(position)
            found = [dataclasses.asdict(delivery) if delivery else None, ends]
        found, ends = self._agreement.gather(found)[0]
        return Delivery.from_json(found) if found else None, ends

    def _position(self, *, verify: bool = False) -> int:
        """Returns the step of the newest checkpoint, from which a start would continue, according to the chief.

        Args:
          verify: Whether to read the checkpoint, and to use an earlier one if it is damaged.
        """
        step = 0
        if self._chief:
            directory = pathlib.Path(self._workdir) / "checkpoints"
            for step in [*reversed(files.steps_in(directory)), 0]:
                if not (step and verify) or _is_intact(directory / files.directory_name(step)):
                    break
        return int(self._agreement.gather(step)[0])

    def _welcome(self, position: int) -> str:
        known = len(self._chief.journal.deliveries) if self._chief else 0
        before = f"; {_count(known, 'delivery', 'deliveries')} before, learned to step {position}" if known else ""
        return f"watching {self._options.watch}{before}; a file STOP there, or Ctrl-C, ends the run"

    def _finish(self, results: Mapping[str, Any]) -> dict[str, Any]:
        if not self._chief:
            return {}
        journal = self._chief.journal
        summary = {
            "deliveries": len(journal.deliveries),
            "examples": journal.examples(len(journal.deliveries)),
            "steps": journal.steps,
            "skipped": len(journal.skipped),
            "repeated": len(journal.repeated),
            "eval": dict(results.get("eval") or {}),
            "params_sha256": results.get("params_sha256", ""),
        }
        self._say(
            f"learned from {_count(summary['examples'], 'example')} in "
            f"{_count(summary['deliveries'], 'delivery', 'deliveries')}; {_count(summary['skipped'], 'file')} skipped"
        )
        if journal.deliveries:
            model = f"{self._workdir}/exports/newest/model.keras"
            self._say(f"look next\n  {model}\n  {command_of('tensorboard')} --logdir {shlex.quote(str(self._workdir))}")
        return summary

    def _say(self, text: str) -> None:
        if self._shown:
            _log.info("%s", text)


def _quiet(config: ExperimentConfig) -> ExperimentConfig:
    return dataclasses.replace(config, monitor=dataclasses.replace(config.monitor, verbose=0))


def _is_intact(path: pathlib.Path) -> bool:
    try:
        files.read(path)
    except (OSError, ValueError):
        return False
    return True


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"
