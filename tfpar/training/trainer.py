"""`Trainer`: one custom training loop around every strategy."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tfpar import inputs, models, precision
from tfpar.checkpoint import run_state, workdir_lock
from tfpar.cluster import failure
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import CUSTOM, ConfigError, ExperimentConfig
from tfpar.exchange import Exchange
from tfpar.guards.bad_examples import SkippedExamples, named
from tfpar.optim import keras_internals, optimizers, schedules
from tfpar.parallel import strategies
from tfpar.training.core import Core
from tfpar.training.evaluation import Evaluation
from tfpar.training.loops.parameter_server import AsynchronousRun
from tfpar.training.loops.synchronous import SynchronousRun
from tfpar.training.metrics import build_metrics
from tfpar.training.objective import SupervisedObjective, per_example_loss, uses_integer_labels
from tfpar.training.start import initialize
from tfpar.training.step import TrainStep
from tfpar.training.uneven_batches import train_input
from tfpar.training.validate import SYNCHRONISED, validate_data, validate_model

import keras
import numpy as np
import tensorflow as tf

_CONVOLUTIONAL_SHARE = 0.1


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

    A strategy of several devices or workers can only start before TensorFlow runs its first op, and a Keras model,
    optimizer or metric that is made runs one: give functions and names, or call `tfpar.initialize` before making any.

    Args:
      model: A function that builds a Keras model (called under the strategy), or a model. A model that was built
        outside the strategy is rebuilt under it from its configuration and weights.
      optimizer: A Keras optimizer, a name (`"adamw"`), or None for what the options say. An optimizer object keeps its
        own learning rate or schedule unless `schedule` is given.
      loss: A Keras loss, its name, or a function `(y, outputs) -> values [m, ...]`; reduced over examples by weight.
      metrics: Keras metrics whose state is a sum, names, or functions; `"accuracy"` is the one that fits the loss.
      config: The whole configuration; `options` override single fields of it.
      runtime: From `tfpar.initialize(config)`; by default the trainer starts one.
      augmentation: Keras layer applied to the inputs on the device, inside the step, in training only; by default what
        the option `augment` names.
      **options: Any option of `tfpar.config` by its flag name: `strategy="mirrored", devices=2, exchange="none",
        precision="mixed_bfloat16", jit_compile=..., accumulate_steps=4, clip_norm=1.0, workdir="runs/a"`.

    Raises:
      ConfigError: Options that cannot work, with the way out.
    """

    def __init__(
        self,
        model: keras.Model | Callable[[], keras.Model],
        optimizer: keras.optimizers.Optimizer | str | None = None,
        loss: Any = None,
        metrics: Sequence[Any] = (),
        *,
        config: ExperimentConfig | None = None,
        runtime: strategies.Runtime | None = None,
        augmentation: keras.layers.Layer | None = None,
        **options: Any,
    ) -> None:
        flat = (config or ExperimentConfig()).as_flat_dict()
        if config is None:  # its defaults would record names of what was never used
            flat |= {"model": CUSTOM, "dataset": CUSTOM}
        if isinstance(options.get("jit_compile"), bool):
            options["jit_compile"] = str(options["jit_compile"]).lower()
        if isinstance(optimizer, str):
            options["optimizer"] = optimizer
        elif optimizer is not None:
            options["optimizer"] = CUSTOM
        self.config = ExperimentConfig.from_flat_dict({**flat, **options})
        if isinstance(optimizer, keras.optimizers.Optimizer):
            _check_has_effect(optimizer, options)
        if loss is None:
            raise ConfigError("loss is missing: give a Keras loss, its name, or a function (y, outputs).")
        self.runtime = runtime or initialize(self.config)
        self.strategy = self.runtime.strategy
        self.topology = self.runtime.topology
        self._own_schedule = isinstance(optimizer, keras.optimizers.Optimizer) and "schedule" not in options
        self.optimizer_options: dict[str, Any] = {}
        if isinstance(optimizer, keras.optimizers.Optimizer):
            self.optimizer_options = run_state.optimizer_options(optimizer)
            if not self._own_schedule:
                self.optimizer_options.pop("learning_rate", None)
        with self.strategy.scope():
            self.model = _under_strategy(model, self.strategy)
            if not self.model.trainable_variables:
                raise ConfigError(
                    f"the model {self.model.name!r} has no trainable weights, so there is nothing to train. Set "
                    "trainable=True on the layers that should learn, or only evaluate it."
                )
            self.optimizer = self._build_optimizer(optimizer)
            self.optimizer.build(self.model.trainable_variables)
            if augmentation is None:
                augmentation = inputs.build_augmentation(self.config.input.augment, self.config.train.seed)
            objective = SupervisedObjective(
                self.model, per_example_loss(loss), build_metrics(metrics, loss, _shape_of_output(self.model))
            )
            self.core = Core(self.model, objective, augmentation)
        self._uses_integer_labels = uses_integer_labels(loss)
        self._check_precision()
        self.exchange = Exchange(self.config.exchange.exchange)
        with failure.peer_errors_named(self.topology.cluster):
            self.exchange.build(
                self.model.trainable_variables,
                strategy=self.strategy,
                workers=self.topology.workers if self.topology.synchronous else 1,
                worker=max(self.topology.worker, 0),
                seed=self.config.train.seed,
                overlap=self._gradients_come_in_turn(),
            )
        self._evaluation: Evaluation | None = None
        self._evaluated: tuple[inputs.Source, inputs.Pipeline, Any] | None = None
        self._named_skipped: set[str] = set()  # sources whose examples that evaluation skips have been named
        self._step: tuple[Any, TrainStep] | None = None

    def fit(
        self,
        train: inputs.Source,
        *,
        steps: int | None = None,
        epochs: float | None = None,
        validation: inputs.Source | None = None,
    ) -> dict[str, Any]:
        """Trains, evaluates, checkpoints and writes the results.

        With a `workdir` that holds a checkpoint, training goes on from there.

        Args:
          train: Training examples.
          steps: Updates in all; by default what the configuration says.
          epochs: Passes over the examples, instead of `steps`.
          validation: Examples to evaluate on, at every `eval_every` updates and at the end.

        Returns:
          The contents of `summary.json`.

        Raises:
          ConfigError: Neither steps nor epochs, an empty data set, a checkpoint of another run, data of more classes
            than the model has outputs, validation examples of another shape, a workdir that another job writes.
          CheckpointError: A checkpoint could not be written, and `on_checkpoint_error` is `fail`.
          PeerLostError: Another worker ended, hangs or cannot be reached. TensorFlow's runtime of this process is of no
            more use: end it, and start all workers again.
          Preempted: SIGTERM came to a worker; all have saved a checkpoint if they could. A SystemExit with code 85.
        """
        for role, source in (("train", train), ("validation", validation)):
            if source is not None and not isinstance(source, inputs.Source):
                raise ConfigError(
                    f"fit({role}=...): a {type(source).__name__} is no source of examples. Make one with "
                    "tfpar.inputs.from_arrays(x, y), or tfpar.inputs.build_source."
                )
        validate_data(self.config, self.topology, train, validation)
        built = {"model": self.model, "integer_labels": self._uses_integer_labels}
        validate_model(self.config, self.topology, train, validation, **built)
        augmentation = self.core.augmentation
        if augmentation is not None and not augmentation.built:
            augmentation.build((None, *train.info.input_spec.shape))
        kind = SynchronousRun if self.topology.synchronous else AsynchronousRun
        workdir = self.config.checkpoint.workdir if self.topology.is_chief else ""
        # `peer_errors_named` acts before anything is closed: a launcher may ask this worker to end meanwhile, and it
        # must have named the lost worker by then.
        with (
            workdir_lock.lock_workdir(workdir),
            contextlib.ExitStack() as closing,
            failure.peer_errors_named(self.topology.cluster),
        ):
            run = kind(self, train, validation, steps, epochs)
            if run.checkpointer:
                closing.callback(run.checkpointer.abandon)  # what is being written must not go on without the lock
            return run.run()

    def evaluate(self, source: inputs.Source) -> dict[str, float]:
        """Loss and metrics over all examples of a source, each counted once.

        Args:
          source: Examples; no shuffling, no augmentation.

        Returns:
          `loss`, `examples`, and one entry per metric.

        Raises:
          ConfigError: The strategy is `parameter_server`, whose chief alone evaluates, beside the training.
        """
        if not self.topology.synchronous:
            raise ConfigError(
                "--strategy=parameter_server evaluates while it trains: give fit(validation=...). To evaluate a model "
                "that is trained, use --strategy=one_device, mirrored or multi_worker."
            )
        pipeline, elements = self._evaluation_inputs(source)
        weights = self.evaluated_weights()
        if self._evaluation is None or not all(map(operator.is_, self._evaluation.weights, weights)):
            self._evaluation = Evaluation(
                self.core,
                self.strategy,
                agreement=WorkerAgreement(world_group(self.topology.workers, self.topology.worker)),
                jit_compile=self.jit_compile,
                weights=weights,
            )
        updates = pipeline.updates_per_epoch
        read = functools.partial(pipeline.indices, 0, updates, max(self.topology.worker, 0))
        with failure.peer_errors_named(self.topology.cluster), named(source, read):
            results = self._evaluation.run(iter(elements), updates)
        total = source.info.num_examples
        already_named = source.info.fingerprint in self._named_skipped
        if results["examples"] < total and self.topology.is_chief and not already_named:
            self._named_skipped.add(source.info.fingerprint)
            SkippedExamples(pipeline, is_chief=True).name(np.arange(total))
        return results

    def pipeline(self, source: inputs.Source, *, training: bool) -> inputs.Pipeline:
        """The input pipeline of a source for this layout."""
        return inputs.Pipeline(
            source,
            train_input(self.config) if training else self.config.input,
            accumulate_steps=self.config.train.accumulate_steps if training else 1,
            replicas=self.topology.replicas,
            workers=self.topology.input_pipelines,
            seed=self.config.train.seed,
            training=training,
        )

    def distribute(self, pipeline: inputs.Pipeline, start_update: int = 0) -> Any:
        """The pipeline's elements on this worker's devices, one per replica."""
        topology = self.topology
        if topology.local_replicas == 1 and topology.device_type == "CPU":
            # Nothing to hand out: a distributed iterator would cost 0.2 ms a step (TensorFlow 2.21, GeneratorDataset).
            return pipeline.dataset(topology.worker, 1, start_update)

        def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
            replicas = topology.replicas // topology.input_pipelines
            return pipeline.dataset(context.input_pipeline_id, replicas, start_update)

        options = tf.distribute.InputOptions(experimental_fetch_to_device=topology.device_type != "CPU")
        return self.strategy.distribute_datasets_from_function(dataset, options)

    @functools.cached_property
    def jit_compile(self) -> bool:
        """Whether forward, backward and update are compiled by XLA; see `--jit_compile`."""
        choice, obstacle = self.config.train.jit_compile, self._xla_obstacle()
        if choice == "true" and obstacle:
            raise ConfigError(f"--jit_compile=true: {obstacle}. Use --jit_compile=auto, or another model.")
        return choice == "true" or (choice == "auto" and not self.why_no_xla())

    @functools.cached_property  # it traces the model, which takes seconds for a large one
    def description(self) -> models.ModelSummary | None:
        """Size and cost of the model, or None where its inputs are not known before it runs."""
        try:
            return models.describe(self.model)
        except ValueError:
            return None

    def why_no_xla(self) -> str:
        """Why `--jit_compile=auto` leaves XLA out for this model in this layout; empty where it does not."""
        if obstacle := self._xla_obstacle():
            return obstacle
        # 3 to 6 times as slow for the convnet, 1.2 times for ResNet-18 (docs/benchmarks/xla.md).
        if self.topology.device_type == "CPU" and self._is_convolutional():
            return "XLA is slower than TensorFlow's own kernels in convolutions on CPUs; --jit_compile=true turns it on"
        return ""

    def _is_convolutional(self) -> bool:
        """Whether convolutions take a good part of the model's FLOPs, or cannot be told from the rest before it runs.

        Less than that is the patch embedding of a transformer, which gains more than it loses.
        """
        has_some = models.uses_convolutions(self.model)
        if not has_some and models.is_of_known_layers(self.model):  # before it is traced
            return False
        return has_some if self.description is None else self.description.convolution_share > _CONVOLUTIONAL_SHARE

    def _xla_obstacle(self) -> str:
        """Why XLA cannot compile this model in this layout; empty where it can."""
        if self.topology.replicas > 1 and models.uses_synchronized_statistics(self.model):
            return SYNCHRONISED
        if self.config.train.deterministic and models.uses_max_pooling(self.model):
            return "the gradient of the model's max pooling has no deterministic XLA kernel in TensorFlow"
        return ""

    def evaluated_weights(self) -> list[keras.Variable]:
        """The trainable weights that evaluation and export use: their moving averages where `--ema` keeps them."""
        averages = optimizers.ema_variables(self.optimizer)
        own = self.model.trainable_variables
        if (
            averages is None or int(self.optimizer.iterations.numpy()) == 0
        ):  # before the first update there is no average
            return list(own)
        return [average if average is not None else weight for average, weight in zip(averages, own, strict=True)]

    def learning_rate_schedule(self, total_steps: int) -> schedules.Schedule | None:
        """The schedule of the configuration, or None where the optimizer brought its own learning rate."""
        if self._own_schedule:
            return None
        peak = optimizers.scaled_learning_rate(self.config.optimizer, self.config.input.global_batch_size)
        return schedules.build(self.config.schedule, peak=peak, total_steps=total_steps)

    def train_step(self, schedule: schedules.Schedule | None, *, anew: bool = False) -> TrainStep:
        """The step with this schedule.

        Another `fit` with an equal schedule gets the step that is compiled already, unless it is to be made anew
        because the exchange has changed.
        """
        key = (type(schedule), schedule.get_config() if schedule is not None else None)
        if anew or self._step is None or self._step[0] != key:
            config = self.config
            step = TrainStep(
                self.core,
                self.optimizer,
                self.exchange,
                self.strategy,
                schedule=schedule,
                seed=config.train.seed,
                jit_compile=self.jit_compile,
                clip_norm=config.optimizer.clip_norm,
                scale_loss=precision.uses_loss_scale(config.precision.precision),
                growth_steps=precision.growth_steps(config.precision),
                timed=not config.train.deterministic,
            )
            self._step = key, step
        return self._step[1]

    def variables(self) -> dict[str, keras.Variable]:
        """Every variable that defines the run, by the name it has in a checkpoint."""
        return {
            **run_state.named(self.model.variables, "model"),
            **run_state.named(self.optimizer.variables, "optimizer"),
        }

    def _evaluation_inputs(self, source: inputs.Source) -> tuple[inputs.Pipeline, Any]:
        """The pipeline of a source and its elements; kept for the next evaluation, as they take 0.3 s to make."""
        if self._evaluated is None or self._evaluated[0] is not source:
            pipeline = self.pipeline(source, training=False)
            self._evaluated = source, pipeline, self.distribute(pipeline)
        return self._evaluated[1:]

    def _gradients_come_in_turn(self) -> bool:
        """Whether some are complete before others, and can leave: an XLA program, or a loop over micro-batches, gives
        all at once. On GPUs calls of two groups, ours and that of synchronised batch statistics, must not mix."""
        mixes = self.topology.device_type == "GPU" and models.uses_synchronized_statistics(self.model)
        return not self.jit_compile and self.config.train.accumulate_steps == 1 and not mixes

    def _build_optimizer(self, optimizer: Any) -> keras.optimizers.Optimizer:
        if optimizer is None or isinstance(optimizer, str):
            return optimizers.build(self.config.optimizer, global_batch_size=self.config.input.global_batch_size)
        optimizers.check_optimizer(optimizer)
        if keras_internals.strategy_of(optimizer) is self.strategy:
            return optimizer
        return optimizers.recreate(optimizer)  # its slots must be made under the strategy

    def _check_precision(self) -> None:
        wanted = precision.policy(self.config.precision.precision).compute_dtype
        layers = keras_internals.all_layers(self.model, include_self=False)
        used = {layer.compute_dtype for layer in layers if layer.weights}
        if used and wanted not in used:
            raise ConfigError(
                f"--precision={self.config.precision.precision}: the model was built to compute in "
                f"{', '.join(sorted(used))}. Pass a function that builds it, or build it after "
                "tfpar.initialize(config)."
            )


def _check_has_effect(optimizer: keras.optimizers.Optimizer, options: dict[str, Any]) -> None:
    """Refuses options that say how to make or drive an optimizer next to one that is made already."""
    idle = {"optimizer_args", "weight_decay", "weight_decay_exclude", "ema"} & options.keys()
    if "schedule" not in options:
        idle |= {"learning_rate", "base_batch_size", "schedule_args", "warmup_steps"} & options.keys()
    if idle:
        way = "" if "schedule" in options else ", or give a schedule=... that replaces the object's learning rate"
        raise ConfigError(
            f"{', '.join(sorted(idle))}: without effect on the {type(optimizer).__name__} object given as optimizer. "
            f"Set it there, or give the optimizer by name{way}."
        )


def _shape_of_output(model: keras.Model) -> tuple[int | None, ...] | None:
    """Shape of the model's output with the batch, or None where it has several or they are not known."""
    outputs = getattr(model, "outputs", None)
    return tuple(outputs[0].shape) if outputs and len(outputs) == 1 else None


def _under_strategy(model: keras.Model | Callable[[], keras.Model], strategy: tf.distribute.Strategy) -> keras.Model:
    if not isinstance(model, keras.Model):
        if not callable(model):
            raise ConfigError(f"model={model!r} is no Keras model, nor a function that builds one.")
        built = model()
        if not isinstance(built, keras.Model) or not built.built:
            raise ConfigError(
                f"model() returned {built!r}; it must return a built Keras model. Give it an Input, or call it on a "
                "batch (of zeros) before it is returned."
            )
        return built
    if not model.built:
        raise ConfigError("the model has no weights yet: call it on data or give it an Input, or pass a function.")
    if not model.variables or strategy.extended.variable_created_in_scope(model.variables[0].value):
        return model
    try:
        rebuilt = type(model).from_config(model.get_config())
        rebuilt.set_weights(model.get_weights())
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the model was built outside the strategy and cannot be rebuilt under it ({error}). Pass a function that "
            "builds it: Trainer(lambda: build_model(), ...)."
        ) from error
    return rebuilt
