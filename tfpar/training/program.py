"""The program that a training loop runs: model, optimizer and exchange under a running strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpar import inputs, models, precision
from tfpar.checkpoint import run_state
from tfpar.cluster import failure
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.exchange import Exchange
from tfpar.monitor.samples import TextSampler
from tfpar.optim import keras_internals, optimizers, schedules
from tfpar.outer.local import AnyRounds, exchange_of
from tfpar.parallel import strategies
from tfpar.parallel.replica_peers import exchanging_workers
from tfpar.parallel.split import whole_tensor
from tfpar.parallel.topology import Topology
from tfpar.process.activity import activity
from tfpar.process.memory import return_freed_memory
from tfpar.training.core import Core
from tfpar.training.local_steps.building import build_rounds
from tfpar.training.local_steps.step import local_step
from tfpar.training.model.adapting import adapt_model
from tfpar.training.model.averages import AveragesBetweenRuns, MovingAverages
from tfpar.training.model.building import Original, build_model
from tfpar.training.model.own_loss import OwnLossObjective, objective_of
from tfpar.training.model.recompute import recompute_activations
from tfpar.training.model.support import check_model, check_precision, known_summary, own_metrics
from tfpar.training.model.whole_batches import BatchReaders
from tfpar.training.model.xla import is_convolutional, xla_obstacle
from tfpar.training.objective import Goal, OwnGoal, SupervisedObjective
from tfpar.training.objective.losses import uses_integer_labels
from tfpar.training.optimizer_spec import OptimizerSpec
from tfpar.training.placing.base import Placing
from tfpar.training.placing.choose import placing_of
from tfpar.training.placing.elements import elements_on_devices
from tfpar.training.placing.own_parts import OwnParts
from tfpar.training.sharding import OwnShare, SharedAverages, sharded_step
from tfpar.training.step import TrainStep
from tfpar.training.uneven_batches import eval_input, train_input
from tfpar.training.validate import validate_same_goal

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The program that a training loop runs. It does not depend on the loop, and every loop runs the same one.

    Attributes:
      config: The experiment.
      topology: Its workers, replicas and devices.
      strategy: The running strategy that all variables were created under.
      core: Model, loss, metrics and augmentation, as pure functions.
      optimizer: Built for the model's trainable variables.
      exchange: Built for the same variables.
      optimizer_options: Options of an optimizer object, which a checkpoint records; empty for an optimizer given by
        name.
      keeps_own_rate: Whether the optimizer keeps its own learning rate, so that no schedule drives it.
      integer_labels: Whether the loss reads labels as positions among the model's outputs.
      original: The user's model, where a copy of it is trained; else None.
      share: This worker's share of the weights and their optimizer state, if that is sharded; otherwise None.
      placing: The placement of the parts of a replica.
      own: The parts that replace those of supervised training.
    """

    config: ExperimentConfig
    topology: Topology
    strategy: tf.distribute.Strategy
    core: Core
    optimizer: keras.optimizers.Optimizer
    exchange: Exchange
    optimizer_options: Mapping[str, Any]
    keeps_own_rate: bool
    integer_labels: bool
    original: Original | None = None
    share: OwnShare | None = None
    placing: Placing = dataclasses.field(default_factory=Placing)
    own: OwnParts = dataclasses.field(default_factory=OwnParts)
    # The compiled step and its schedule: at most one.
    _steps: list[tuple[Any, TrainStep]] = dataclasses.field(default_factory=list, repr=False)

    @classmethod
    def build(
        cls,
        config: ExperimentConfig,
        runtime: strategies.Runtime,
        *,
        model: keras.Model | Callable[[], keras.Model],
        optimizer: OptimizerSpec,
        goal: Goal | OwnGoal,
        augmentation: keras.layers.Layer | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> Program:
        """Creates model, optimizer and metrics under the strategy, and connects the exchange.

        Args:
          config: The experiment.
          runtime: The running strategy.
          model: A Keras model, copied if the strategy needs its own variables; or a function that builds one.
          optimizer: By name, or an object.
          goal: Losses and metrics, assigned to the model's outputs by `bind`; or an objective of the user's own.
          augmentation: Applied to inputs in training; by default the layer that `--augment` names.
          layout: How layers are divided over a model axis, see `find_layout`.

        Raises:
          ConfigError: A model, loss, metric or precision that cannot be used.
        """
        strategy, recorded_options = runtime.strategy, optimizer.recorded_options()  # before the rate is changed
        reports = runtime.topology.is_chief and config.monitor.verbose > 0
        placing = placing_of(runtime, layout, config.train)
        goal.check_names()
        validate_same_goal(runtime.topology, model, goal)
        made = placing.build_first(model, strategy, announced=reports)
        with placing.scope(model, strategy), activity("building the model", shown=reports):
            built, original = made or build_model(model, strategy, announced=reports)
            check_model(built, synchronous=runtime.topology.synchronous)
            adapt_model(built, config.train, original, announced=reports)
            recompute_activations(built, config.train.recompute, announced=reports)
            summary = placing.place(built, config, announced=reports)
            augmentation = inputs.build_augmentation(config.input.augment, config.train.seed, augmentation)
            metrics, replicas = own_metrics(built, goal.metric_names()), strategy.num_replicas_in_sync
            parts = built, objective_of(built, goal), augmentation, metrics, replicas
            core = placing.core_class(*parts, unrolls=placing.several)
        check_precision(built, config.precision.precision, announced=reports)
        weights, topology = built.trainable_variables, placing.topology or runtime.topology
        share = OwnShare.of(config, topology, weights, optimizer, core.overwritten, strategy, placing.exchanged(built))
        keras_optimizer = share.optimizer if share else placing.optimizer(optimizer, config, built, strategy)
        program = cls(
            *(config, topology, strategy, core, keras_optimizer),
            exchange_of(config),
            recorded_options,
            optimizer.keeps_own_rate,
            uses_integer_labels(goal.loss),
            *(original, share, placing),
        )
        placing.check(program.optimizer, core)
        if placing.several:
            vars(program)["model_summary"] = summary
            placing.use_xla(program.jit_compile)
        program._build_exchange()
        return program

    def bind(self, source: inputs.AnySource) -> None:
        """Assigns losses and metrics to the outputs of the model, for labels like those of a source.

        Raises:
          ConfigError: Losses, metrics, labels and outputs that do not fit.
        """
        objective = self.core.objective
        if isinstance(objective, SupervisedObjective | OwnLossObjective):
            with self.strategy.scope():
                objective.bind(source.info.input_spec, source.info.label_spec)
        self.placing.check_loss(self.core, source.info.input_spec, source.info.label_spec)

    @property
    def reports(self) -> bool:
        """Whether this process prints what it is doing: the chief, unless `--verbose=0`."""
        return self.topology.is_chief and self.config.monitor.verbose > 0

    @property
    def model(self) -> keras.Model:
        """The model, under the strategy."""
        return self.core.model

    @functools.cached_property
    def jit_compile(self) -> bool:
        """Whether XLA compiles forward, backward and optimizer, or stages of them; see `--jit_compile`."""
        choice, obstacle = self.config.train.jit_compile, self._xla_obstacle()
        if choice == "true" and obstacle:
            raise ConfigError(f"--jit_compile=true: {obstacle}. Use --jit_compile=auto, or another model.")
        return choice == "true" or (choice == "auto" and not self.xla_disabled_reason)

    @property
    def compiles_whole(self) -> bool:
        """Whether the step of a replica is one or two XLA programs; false if the replica spans several devices."""
        return self.jit_compile and not self.placing.several

    @property
    def compiles_update(self) -> bool:
        """Whether the optimizer's update is an XLA program. It communicates nothing, so that it can be one even where
        the passes cannot; in convolutional models on CPUs, it is too short to be compiled for itself."""
        if not (self.topology.synchronous and (self.share or self.placing).can_compile_update):
            return False
        if self.jit_compile or self.topology.device_type == "TPU":
            return self.jit_compile
        return self.config.train.jit_compile == "auto" and bool(self._xla_obstacle()) and not self._slower_with_xla()

    @functools.cached_property
    def xla_disabled_reason(self) -> str:
        """Why `--jit_compile=auto` compiles no passes for this model and topology; empty if it does."""
        slower = "XLA is slower than TensorFlow's own kernels in convolutions on CPUs; --jit_compile=true turns it on"
        return self._xla_obstacle() or (slower if self._slower_with_xla() else "")

    def _slower_with_xla(self) -> bool:
        # 3 to 6 times as slow for the convnet, 1.2 times for ResNet-18 (README.md).
        return self.topology.device_type == "CPU" and is_convolutional(self.model, lambda: self.model_summary)

    @functools.cached_property  # it traces the model, which takes seconds for a large one
    def model_summary(self) -> models.ModelSummary | None:
        """Size and cost of the model, or None where its inputs are not known before it runs."""
        with activity("counting FLOPs and parameters", shown=self.reports):
            return known_summary(self.model)

    @functools.cached_property
    def text_sampler(self) -> TextSampler:
        """Generates text with the model, if it is a language model; traced once for all runs of the program."""
        return TextSampler(self.model, jit_compile=self.compiles_whole)

    @functools.cached_property
    def predict_alone(self) -> Any:
        """`Core.predict` on this process alone, traced once for all runs of the program."""
        return tf.function(self.core.predict, autograph=False, jit_compile=self.compiles_whole or None)

    def pipeline(self, source: inputs.AnySource, *, training: bool) -> inputs.AnyPipeline:
        """The input pipeline of a source for this topology.

        Raises:
          ConfigError: The batches have padding, which would count in the model's computations over whole batches.
        """
        pipeline = inputs.build_pipeline(
            source,
            train_input(self.config) if training else eval_input(self.config),
            accumulate_steps=self.config.train.accumulate_steps if training else 1,
            replicas=self.topology.replicas,
            workers=self.topology.input_pipelines,
            seed=self.config.train.seed,
            training=training,
        )
        self.batch_readers.check(pipeline, source, self.config.input, training=training)
        return pipeline

    @functools.cached_property
    def batch_readers(self) -> BatchReaders:
        """The parts of the model that read a batch as a whole."""
        return BatchReaders.of(self.core, self.topology)

    def distribute(self, pipeline: inputs.AnyPipeline, start: int = 0, *, padded: bool = False) -> Any:
        """The pipeline's elements on this worker's devices, one per replica, from step `start` on; all `padded`, or
        without padding where the model reads whole batches."""
        shorten = functools.partial(self.batch_readers.shorten, pipeline, padded=padded)
        several = self.placing.several
        return elements_on_devices(pipeline, self.topology, self.strategy, shorten, start, several=several)

    def iterate(self, pipeline: inputs.AnyPipeline, start: int) -> Any:
        """An iterator over a pipeline's elements for training, from step `start`, or from the saved position of a
        stream."""
        iterator = iter(self.distribute(pipeline, start))
        pipeline.follow(iterator)
        return iterator

    def schedule(self, total_steps: int) -> schedules.Schedule | None:
        """The configuration's learning-rate schedule, or None where the optimizer keeps its own learning rate."""
        if self.keeps_own_rate:
            return None
        peak = optimizers.scaled_learning_rate(self.config.optimizer, self.config.step_batch_size)
        return schedules.build(self.config.schedule, peak=peak, total_steps=total_steps)

    def step(self, schedule: schedules.Schedule | None, *, rebuild: bool = False) -> TrainStep:
        """The training step with this schedule, on a synchronous strategy.

        A later call with an equal schedule returns the step that is already compiled.

        Args:
          schedule: From `schedule`.
          rebuild: Trace it again, because the exchange has changed.
        """
        key = (type(schedule), schedule.get_config() if schedule is not None else None)
        if rebuild or not self._steps or self._steps[0][0] != key:
            step = self._step_class()(
                *(self.core, self.optimizer, self.exchange, self.strategy),
                schedule=schedule,
                seed=self.config.train.seed,
                jit_compile=self.compiles_whole,
                compiles_update=self.compiles_update,
                clip_norm=self.config.optimizer.clip_norm,
                scale_loss=precision.uses_loss_scale(self.config.precision.precision),
                growth_steps=precision.growth_steps(self.config.precision),
                timed=not self.config.train.deterministic,
            )
            self._steps[:] = [(key, step)]
        return self._steps[0][1]

    def _step_class(self) -> Callable[..., TrainStep]:
        own, step = self.own.step, self.placing.step_class(self.model)
        if self.placing.own_step and (own or self.rounds):
            raise ConfigError(f"{self.placing.own_step} is for steps of supervised training alone. Leave it out.")
        if self.rounds:
            return local_step(step, self.placing.exchanged(self.model))
        return own or (sharded_step(self.share, step) if self.share else step)

    @functools.cached_property
    def rounds(self) -> AnyRounds | None:
        """The rounds of local steps, if there are any; None if gradients are exchanged in every step."""
        with self.placing.scope(self.model, self.strategy):
            return build_rounds(self.config, self.topology, self.strategy, self.core, self.optimizer, self.exchange)

    def refreshed(self) -> Program:
        """The program for the currently trainable weights: this one, unless layers were frozen or unfrozen since.

        A new program has an optimizer for these weights, which keeps its state for weights that stay trainable, and an
        exchange without residuals.

        Raises:
          ConfigError: Nothing is left to train.
        """
        if self.original is not None:
            self.original.take_over()
        optimizers.take_over_rate(self.share.optimizers if self.share else [self.optimizer])
        known = self.share.variables if self.share else keras_internals.trainable_variables(self.optimizer)
        if [*map(id, self.model.trainable_variables)] == [*map(id, known)]:
            return self
        if self.share is not None or self.topology.shards_weights:
            raise ConfigError(
                f"--shard={self.config.train.shard}: layers were frozen or unfrozen since the last fit, which changes "
                "the weights to shard. Create a new Trainer, or use --shard=none."
            )
        check_model(self.model, synchronous=self.topology.synchronous)
        optimizer = self.placing.recreated(self.optimizer, self.model, self.strategy)
        program = dataclasses.replace(self, optimizer=optimizer, exchange=exchange_of(self.config), _steps=[])
        program._build_exchange()
        return program

    @contextlib.contextmanager
    def left_to_user(self, between: AveragesBetweenRuns) -> Iterator[None]:
        """At the end, leaves the user's model with the weights, or with the averages of the user's optimizer."""
        with contextlib.ExitStack() as stack:
            if self.original is not None:
                stack.enter_context(self.original.written_back(self.first_copies))
            if self.optimizer.use_ema:
                one_run = bool(self.config.checkpoint.workdir)
                assigns = bool(self.optimizer_options)
                stack.enter_context(between.left_behind(self.averages, assigns=assigns, one_run=one_run))
            yield

    def eval_weights(self) -> list[keras.Variable]:
        """The trainable weights that evaluation and export use, within `averages.shown()`."""
        return self.averages.weights()

    @functools.cached_property
    def averages(self) -> MovingAverages:
        """The moving averages of the weights, which `--ema` keeps."""
        if self.share:
            return SharedAverages(self.model, self.share, self.topology)
        return MovingAverages(self.model, self.optimizer)

    def checkpoint_variables(self) -> dict[str, keras.Variable]:
        """Every variable that defines a run and is the same on every worker, by the name it has in a checkpoint."""
        optimizer = self.share.shared_variables() if self.share else self.optimizer.variables
        outer = self.rounds.outer_state if self.rounds else []
        groups = {"model": self.model.variables, "optimizer": optimizer, "outer": outer, **self.own.variables}
        return {name: each for group in groups for name, each in run_state.named(groups[group], group).items()}

    def first_copies(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """The values of variables on the first replica of this process; no other replica is touched."""
        local = self.strategy.experimental_local_results
        return [whole_tensor(variable, local(variable.value)[0]) for variable in variables]

    def _build_exchange(self) -> None:
        if self.placing.several:
            return_freed_memory()  # of the whole model, before buffers are made: parts of it have been moved
        waiting = activity(f"preparing --exchange={self.config.exchange.exchange} with all workers", shown=self.reports)
        with failure.peer_errors_named(self.topology.cluster), waiting:
            self.exchange.build(
                strategy=self.strategy,
                **exchanging_workers(self.topology, self._device_of_rounds),
                seed=self.config.train.seed,
                overlap=self._can_overlap_exchange(),
                **self.placing.exchange_arguments(self.model) | (self.share.exchanged() if self.share else {}),
            )
            self.rounds  # noqa: B018 - all workers make its variables here

    def _can_overlap_exchange(self) -> bool:
        """Whether some gradients are complete before others, so that they can be sent early.

        A single XLA program, or a loop over micro-batches, returns all gradients at once. On GPUs, the calls of two
        groups, the exchange and synchronised batch statistics, must not interleave.
        """
        mixes = self.topology.device_type == "GPU" and models.uses_synchronized_statistics(self.model)
        at_once = (self.jit_compile and not self.placing.in_segments) or self.config.train.accumulate_steps > 1
        return not (at_once or mixes or self._device_of_rounds)

    @property
    def _device_of_rounds(self) -> str:
        """The device on which this worker runs the exchange of a round; empty without rounds."""
        return self.strategy.extended.worker_devices[0] if self.config.outer.uses_rounds else ""

    def _xla_obstacle(self) -> str:
        """Why XLA cannot compile this model in this topology; empty where it can."""
        own = self.placing.xla_obstacle or (self.share.xla_obstacle if self.share else "")
        replicas, deterministic = self.topology.replicas, self.config.train.deterministic
        return own or xla_obstacle(self.model, replicas=replicas, deterministic=deterministic)
