"""`Trainer`: the user interface of training, for every strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

from tfpar import inputs, precision
from tfpar.checkpoint import workdir_lock
from tfpar.cluster import failure
from tfpar.config import CUSTOM, ConfigError, ExperimentConfig, TrainerOptions
from tfpar.config.experiment import refuse_program_options
from tfpar.exchange import Exchange
from tfpar.optim import keras_compile
from tfpar.parallel import strategies
from tfpar.parallel.topology import Topology
from tfpar.process.exit_codes import install_exit_code_hook
from tfpar.training.core import Core
from tfpar.training.duration import in_epochs
from tfpar.training.evaluation import Evaluator
from tfpar.training.loops import keras_callbacks, start_run
from tfpar.training.loops.history import FitResult
from tfpar.training.loops.hooks import Hook, check_hooks
from tfpar.training.loops.keras_callbacks import check_callbacks
from tfpar.training.model import keras_arguments
from tfpar.training.model.averages import AveragesBetweenRuns
from tfpar.training.objective import Goal, Objective, OwnGoal
from tfpar.training.optimizer_spec import OptimizerSpec, peak_rate, refuse_schedule_objects, with_own_accumulation
from tfpar.training.prediction import Predictor
from tfpar.training.program import Program
from tfpar.training.start import check_runtime, initialize, with_plan
from tfpar.training.validate import validate_data, validate_model, validate_saved_run

import keras
import tensorflow as tf

Callbacks: TypeAlias = Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None

_SOURCES = (inputs.Source, inputs.StreamSource, tf.data.Dataset, tuple)


class Trainer:
    """Trains a Keras 3 model on any strategy, with one loop.

    ```python
    train, test = (tfpar.inputs.load("digits", split) for split in ("train", "validation"))
    trainer = tfpar.Trainer(
        lambda: tfpar.models.build("convnet", tfpar.task_spec(train)),
        optimizer="adamw",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        strategy="mirrored", devices=2,
    )
    summary = trainer.fit(train, epochs=10, validation=test)
    ```

    A strategy of several devices or workers can only start before TensorFlow runs its first op, and creating a Keras
    model, optimizer or metric runs one: give functions and names, or call `tfpar.initialize` before creating any.

    Args:
      model: A function that builds a Keras model (called under the strategy), or a model, which has the trained weights
        when `fit` returns or is preempted. On one device the model itself is trained; on several, a copy that is
        created from its configuration and weights, and whose weights are written back.
      optimizer: A Keras optimizer, a name (`"adamw"`), or None for the optimizer that the options name. An optimizer
        object keeps its own learning rate or schedule unless `schedule` is given; its `gradient_accumulation_steps`
        become `accumulate_steps`.
      loss: A Keras loss, its name, or a function `(y, outputs) -> values [m, ...]`; for several outputs a list, a dict
        by output name, or a structure like that of the outputs. Reductions and masks count as in Keras. None if the
        model adds its own loss (`add_loss`) or overrides `compute_loss`.
      metrics: Keras metrics whose state is a sum, names, or functions: a list, or one for each output as for `loss`.
        `"accuracy"` is the accuracy that fits the loss, otherwise the labels and outputs.
      config: The whole configuration; `options` override single fields of it.
      runtime: From `tfpar.initialize(config)`; by default the trainer starts one. Options such as `strategy`, `devices`
        and `mesh` must agree with it, or be left out.
      loss_weights: A factor for each loss, in the structure of `loss`.
      weighted_metrics: Metrics in which sample weights count.
      augmentation: Keras layer applied to the inputs on the device, inside the step, in training only; by default the
        layer that the option `augment` names.
      layout: With a model axis (`mesh="model:2"`), how layers are divided over it, by regular expressions on their
        paths: `{"logits": "gather"}`, see `tfpar.parallel.tensor.layout`; other layers are divided automatically. Or
        how weights are: a `keras.distribution.LayoutMap`, or `{"mlp.*kernel": (None, "model")}`, see
        `tfpar.parallel.tensor.weight_layouts`; other weights stay whole.
      objective: In place of loss and metrics: a function of the built model that returns the objective, in sums over
        the examples of a batch; see `tfpar.training.objective.Objective`.
      **options: Any option of `tfpar.config` by its flag name: `strategy="mirrored", devices=2, exchange="none",
        precision="mixed_bfloat16", jit_compile=..., accumulate_steps=4, clip_norm=1.0, workdir="runs/a"`. Without
        `config`, the precision is by default Keras' global dtype policy.

    Attributes:
      program: The program that training loops run: model, optimizer and exchange under the strategy.
      runtime: The running strategy.

    Raises:
      ConfigError: Options that cannot work, and what to do instead.
    """

    def __init__(
        self,
        model: keras.Model | Callable[[], keras.Model],
        optimizer: keras.optimizers.Optimizer | str | None = None,
        loss: Any = None,
        metrics: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        loss_weights: Any = None,
        weighted_metrics: Sequence[Any] | Mapping[str, Any] | None = None,
        config: ExperimentConfig | None = None,
        runtime: strategies.Runtime | None = None,
        augmentation: keras.layers.Layer | None = None,
        layout: Mapping[str, Any] | strategies.Runtime | None = None,
        objective: Callable[[keras.Model], Objective] | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        install_exit_code_hook()
        given: Mapping[str, Any] = options
        if isinstance(layout, strategies.Runtime):
            runtime, layout = runtime or _deprecated_layout(layout), None
        goal = Goal(loss, loss_weights, metrics, weighted_metrics)
        optimizer, goal = _with_compiled(model, optimizer, goal, objective)
        optimizer, given = with_own_accumulation(optimizer, given, config)
        config = _with_options(config, given, optimizer)
        spec = OptimizerSpec.of(optimizer, given, config)
        goal = dataclasses.replace(goal, loss_weighting=config.train.loss_weighting)
        aim = goal if objective is None else OwnGoal.instead_of(goal, objective)
        if runtime is not None:
            config = with_plan(config, runtime.options)
            check_runtime(config, runtime.topology)
            validate_saved_run(config)
        policy = keras.config.dtype_policy()
        try:
            parts: dict[str, Any] = {"model": model, "optimizer": spec, "layout": layout}
            self.runtime = runtime or initialize(config, complete=True, **parts, objective=objective)
            config = with_plan(config, self.runtime.options)
            precision.match_process(config.precision)
            self.program = Program.build(config, self.runtime, **parts, goal=aim, augmentation=augmentation)
        finally:
            # The precision is that of this trainer's model: later models must not inherit it.
            keras.config.set_dtype_policy(policy)
        self._evaluator = Evaluator(self.program)
        self._predictor = Predictor(self.program)
        self._between_runs = AveragesBetweenRuns()
        self._read_checkpoint = False
        self._label_options = goal.label_options()

    def fit(
        self,
        train: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        validation: Any = None,
        hooks: Sequence[Hook] | Hook | None = (),
        callbacks: Callbacks = (),
        **others: Any,
    ) -> FitResult:
        """Trains, evaluates, checkpoints and writes the results.

        With a `workdir` that holds a checkpoint, training resumes from it. Changes of `layer.trainable` since the last
        call take effect now; the optimizer keeps its state for the weights that stay trainable.

        Args:
          train: Training examples: a source, arrays, a `tf.data.Dataset`, ...: see `tfpar.inputs.as_source`.
          y: Labels, if `train` is an array or a structure of arrays.
          sample_weight: Sample weights, if `train` is arrays.
          class_weight: Weight by class of integer labels, as Keras' `fit` takes it.
          steps: Steps of the whole run; by default as configured.
          epochs: Passes over the examples, instead of `steps`.
          validation: Examples to evaluate on (arrays as `(x, y)`), at every `eval_every` steps and at the end.
          hooks: Functions to run between steps, see `tfpar.Hook`. A run that one of them stops counts as finished.
          callbacks: Keras callbacks, with Keras' logs; see `tfpar.training.loops.keras_callbacks`.
          **others: Must be empty. The error for an argument of Keras' `fit` names what to write instead.

        Returns:
          The contents of `summary.json`; its attribute `history` has loss and metrics of each epoch, as Keras'
          `History` does.

        Raises:
          ConfigError: Neither steps nor epochs, an empty data set, a checkpoint of another run, a workdir that another
            job writes, data that do not fit the model, a hook or callback that cannot work.
          CheckpointError: A checkpoint could not be written, and `on_checkpoint_error` is `fail`.
          PeerLostError: Another worker is lost. End this process, and start all workers again.
          Preempted: A worker received SIGTERM; all have saved a checkpoint if they could. A SystemExit with code 85.
        """
        keras_arguments.refuse("fit", others)
        self._refresh()
        counts = in_epochs(self.config.train, steps, epochs)  # then the number of examples must be known
        train, validation = self._sources((train, y, sample_weight), class_weight, validation, counts=counts)
        hooks, callbacks = check_hooks(hooks), check_callbacks(callbacks, self.topology, self.config.train.shard)
        self._build_augmentation(train)
        workdir = self.config.checkpoint.workdir if self.topology.is_chief else ""
        # `peer_errors_named` acts before anything is closed: a launcher may ask this worker to end meanwhile, and it
        # must have named the lost worker by then.
        with (
            workdir_lock.lock_workdir(workdir),
            contextlib.ExitStack() as closing,
            failure.peer_errors_named(self.topology.cluster),
            self.program.left_to_user(self._between_runs),
        ):
            self._read_checkpoint = True
            arguments = (train, validation, steps, epochs, hooks, callbacks, closing)
            return start_run(self.program, self._evaluator, *arguments).run()

    def _build_augmentation(self, train: inputs.AnySource) -> None:
        augmentation = self.core.augmentation
        if augmentation is not None and not augmentation.built:
            inputs.check_augmentation(self.config.input.augment, train.info.input_spec, train)
            augmentation.build((None, *train.info.input_spec.shape))

    def evaluate(
        self,
        source: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Callbacks = (),
        **others: Any,
    ) -> dict[str, Any]:
        """Loss and metrics over all examples of a source, each counted once; all workers call it together.

        Args:
          source: Examples, as for `fit`, neither shuffled nor augmented, or a dict of several by name.
          y: Labels, if `source` is arrays.
          sample_weight: Sample weights, if `source` is arrays.
          steps: Batches to use, from the beginning; None or 0: all.
          callbacks: Keras callbacks, whose test methods are called.
          **others: Must be empty, as for `fit`.

        Returns:
          `loss`, `examples`, and one entry per metric. For several sources, one such dict for each, by name.

        Raises:
          ConfigError: The strategy is `parameter_server`, whose chief evaluates during training.
        """
        keras_arguments.refuse("evaluate", others)
        self._check_before_reading("evaluates while it trains: give fit(validation=...). To evaluate")
        if y is None and isinstance(source, Mapping) and all(isinstance(each, _SOURCES) for each in source.values()):
            return {name: self._evaluate(f"evaluate({name})", callbacks, steps, each) for name, each in source.items()}
        return self._evaluate("evaluate(source=...)", callbacks, steps, source, y, sample_weight)

    def _evaluate(self, argument: str, callbacks: Callbacks, steps: int | None, *data: Any) -> dict[str, Any]:
        batches = keras_arguments.batches("evaluate", steps)
        callbacks = check_callbacks(callbacks, self.topology, self.config.train.shard)
        source = keras_arguments.as_full_source(argument, *data, steps=batches, **self._reading)
        self._refresh()
        self.program.bind(source)
        with keras_callbacks.testing(callbacks, self.program) as (calls, tell):
            results = self._evaluator(source, steps=batches, calls=calls)
            tell(results)
        return results

    def predict(self, source: Any = None, *, callbacks: Callbacks = (), **others: Any) -> Any:
        """The model's outputs for all examples of a source, computed on all devices; all workers call it together.

        The weights are those that `evaluate` uses: their moving averages with `--ema`.

        Args:
          source: Examples, as for `fit`; no shuffling, no augmentation. Labels, if there are any, are not read.
          callbacks: Keras callbacks, whose prediction methods are called. `on_predict_batch_end` gets the outputs of
            this worker's examples of the batch.
          **others: Must be empty, as for `fit`.

        Returns:
          Arrays `[n, ...]` in the structure of the model's outputs, in the order of the examples, the same on every
          worker. An example that `--on_bad_record=skip` leaves out has NaN, or 0 where outputs are integers.

        Raises:
          ConfigError: The strategy is `parameter_server`.
        """
        keras_arguments.refuse("predict", others)
        self._check_before_reading("does not predict. To predict")
        self._refresh()
        callbacks = check_callbacks(callbacks, self.topology, self.config.train.shard)
        source = keras_arguments.as_inputs("predict(source=...)", source, **self._reading)
        with keras_callbacks.predicting(callbacks, self.program) as calls:
            return self._predictor(source, calls=calls)

    def _check_before_reading(self, what: str) -> None:
        if not self.topology.synchronous:
            raise ConfigError(
                f"--strategy=parameter_server {what} with a model that is trained, use --strategy=one_device, mirrored "
                "or multi_worker."
            )
        if not self._read_checkpoint:
            keras_arguments.warn_of_checkpoint(self.config.checkpoint.workdir)

    @property
    def config(self) -> ExperimentConfig:
        """The whole configuration, options included."""
        return self.program.config

    @property
    def topology(self) -> Topology:
        """The workers, replicas and devices of the run."""
        return self.program.topology

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The running strategy."""
        return self.program.strategy

    @property
    def core(self) -> Core:
        """Model, loss and metrics as pure functions."""
        return self.program.core

    @property
    def model(self) -> keras.Model:
        """The model that is trained, under the strategy: on one device the given one, on several a copy."""
        return self.program.model

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer, built for the model."""
        return self.program.optimizer

    @property
    def exchange(self) -> Exchange:
        """The gradient exchange."""
        return self.program.exchange

    @property
    def jit_compile(self) -> bool:
        """Whether XLA compiles the step."""
        return self.program.jit_compile

    def _refresh(self) -> None:
        """Adapts the program to what was frozen, unfrozen or assigned since the last call."""
        program = self.program.refreshed()
        if program is not self.program:
            self.program, self._evaluator, self._predictor = program, Evaluator(program), Predictor(program)
        self._between_runs.take_over(program.averages)

    @property
    def _reading(self) -> dict[str, Any]:
        """How examples are read that a method gets."""
        return {
            "told": self.config.monitor.verbose > 0,
            **self._label_options,
            "on_bad_record": self.config.input.on_bad_record,
            "batch_size": self.config.eval_batch_size,
        }

    def _sources(
        self, train: tuple[Any, Any, Any], class_weight: Mapping[int, float] | None, validation: Any, *, counts: bool
    ) -> tuple[Any, Any]:
        """The sources of the data that were given to `fit`, checked."""
        source = keras_arguments.as_source("fit(train=...)", *train, counts=counts, split="train", **self._reading)
        if class_weight is not None:
            source = inputs.with_class_weight(source, class_weight)
        if validation is not None:
            steps = self.config.train.eval_steps
            validation = keras_arguments.as_source("fit(validation=...)", validation, steps=steps, **self._reading)
        validate_data(self.config, self.topology, source, validation)
        built = {"model": self.model, "integer_labels": self.program.integer_labels}
        validate_model(self.config, self.topology, source, validation, **built)
        for each in filter(None, (source, validation)):
            self.program.bind(each)
        return source, validation


def _with_compiled(model: Any, optimizer: Any, goal: Goal, objective: Any) -> tuple[Any, Goal]:
    """Optimizer and, without an objective, goal: taken from the arguments of the model's `compile` unless given."""
    if not isinstance(model, keras.Model) or not model.compiled:
        return optimizer, goal
    arguments = keras_compile.compile_arguments(model)
    from_compile = arguments.pop("optimizer", None)
    if goal.loss is not None:  # its weights belong to another loss
        arguments.pop("loss_weights", None)
    missing = {name: value for name, value in arguments.items() if objective is None and getattr(goal, name) is None}
    return (from_compile if optimizer is None else optimizer), dataclasses.replace(goal, **missing)


def _with_options(config: ExperimentConfig | None, options: Mapping[str, Any], optimizer: Any) -> ExperimentConfig:
    """The configuration with single options replaced, and what an optimizer argument implies."""
    refuse_program_options(options, config)
    refuse_schedule_objects(options)
    flat = (config or ExperimentConfig()).as_flat_dict()
    if config is None:  # the defaults would record names that were never used
        flat |= {"model": CUSTOM, "dataset": CUSTOM, "precision": precision.of_process()}
    flat |= options
    if isinstance(options.get("jit_compile"), bool):
        flat["jit_compile"] = str(options["jit_compile"]).lower()
    if optimizer is not None:
        flat["optimizer"] = optimizer if isinstance(optimizer, str) else CUSTOM
    if isinstance(optimizer, keras.optimizers.Optimizer) and "schedule" in options and "learning_rate" not in options:
        flat["learning_rate"] = peak_rate(optimizer)
    return ExperimentConfig.from_flat_dict(flat)


def _deprecated_layout(layout: strategies.Runtime) -> strategies.Runtime:
    """The runtime, given under its name in version 0.1.0."""
    warnings.warn("Trainer(layout=...) is deprecated; use runtime=...", DeprecationWarning, stacklevel=3)
    return layout
