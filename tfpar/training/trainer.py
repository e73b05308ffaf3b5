"""`Trainer`: the user's face of training, around every strategy."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar import inputs
from tfpar.checkpoint import workdir_lock
from tfpar.cluster import failure
from tfpar.config import CUSTOM, ConfigError, ExperimentConfig
from tfpar.exchange import Exchange
from tfpar.parallel import strategies
from tfpar.parallel.topology import Topology
from tfpar.training.core import Core
from tfpar.training.evaluation import Evaluator
from tfpar.training.loops import start_run
from tfpar.training.loops.hooks import Hook, check_hooks
from tfpar.training.loops.keras_callbacks import check_callbacks
from tfpar.training.optimizer_spec import OptimizerSpec
from tfpar.training.program import Program
from tfpar.training.start import initialize
from tfpar.training.validate import validate_data, validate_model

import keras
import tensorflow as tf


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
        when `fit` returns or is preempted. On one device it is trained itself; on several a copy is, made from its
        configuration and weights, and written back.
      optimizer: A Keras optimizer, a name (`"adamw"`), or None for what the options say. An optimizer object keeps its
        own learning rate or schedule unless `schedule` is given.
      loss: A Keras loss, its name, or a function `(y, outputs) -> values [m, ...]`; reduced over examples by weight.
        A model that overrides `compute_loss` needs none.
      metrics: Keras metrics whose state is a sum, names, or functions; `"accuracy"` is the one that fits the loss.
      config: The whole configuration; `options` override single fields of it.
      runtime: From `tfpar.initialize(config)`; by default the trainer starts one.
      augmentation: Keras layer applied to the inputs on the device, inside the step, in training only; by default what
        the option `augment` names.
      **options: Any option of `tfpar.config` by its flag name: `strategy="mirrored", devices=2, exchange="none",
        precision="mixed_bfloat16", jit_compile=..., accumulate_steps=4, clip_norm=1.0, workdir="runs/a"`.

    Attributes:
      program: What training loops run: model, optimizer and exchange under the strategy.
      runtime: The running strategy.

    Raises:
      ConfigError: Options that cannot work, and what to do instead.
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
        runtime = runtime or _deprecated_layout(options)
        config = _with_options(config, options, optimizer)
        spec = OptimizerSpec.of(optimizer, options)
        self.runtime = runtime or initialize(config)
        self.program = Program.build(
            config, self.runtime, model=model, optimizer=spec, loss=loss, metrics=metrics, augmentation=augmentation
        )
        self._evaluator = Evaluator(self.program)

    def fit(
        self,
        train: inputs.Source,
        *,
        steps: int | None = None,
        epochs: float | None = None,
        validation: inputs.Source | None = None,
        hooks: Sequence[Hook] = (),
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ) -> dict[str, Any]:
        """Trains, evaluates, checkpoints and writes the results.

        With a `workdir` that holds a checkpoint, training resumes from it. Layers that were frozen or unfrozen since
        the last call (`layer.trainable`) are from now on; the optimizer keeps its state for the other weights.

        Args:
          train: Training examples.
          steps: Steps of the whole run; by default what the configuration says.
          epochs: Passes over the examples, instead of `steps`.
          validation: Examples to evaluate on, at every `eval_every` steps and at the end.
          hooks: Functions to run between steps, see `tfpar.Hook`. A run that one of them stops counts as finished.
          callbacks: Keras callbacks. They get the logs that Keras would give them, at the ends of epochs; and at those
            of batches, if one of them has a method for batches. See `tfpar.training.loops.keras_callbacks`.

        Returns:
          The contents of `summary.json`.

        Raises:
          ConfigError: Neither steps nor epochs, an empty data set, a checkpoint of another run, data of more classes
            than the model has outputs, validation examples of another shape, a workdir that another job writes, a hook
            or callback that cannot work.
          CheckpointError: A checkpoint could not be written, and `on_checkpoint_error` is `fail`.
          PeerLostError: Another worker ended, hangs or cannot be reached. TensorFlow's runtime of this process is of no
            more use: end it, and start all workers again.
          Preempted: SIGTERM came to a worker; all have saved a checkpoint if they could. A SystemExit with code 85.
        """
        self._refresh()
        self._check_sources(train, validation)
        check_hooks(hooks)
        check_callbacks(callbacks, synchronous=self.topology.synchronous)
        augmentation = self.core.augmentation
        if augmentation is not None and not augmentation.built:
            inputs.check_augmentation(self.config.input.augment, train.info.input_spec)
            augmentation.build((None, *train.info.input_spec.shape))
        workdir = self.config.checkpoint.workdir if self.topology.is_chief else ""
        # `peer_errors_named` acts before anything is closed: a launcher may ask this worker to end meanwhile, and it
        # must have named the lost worker by then.
        with (
            workdir_lock.lock_workdir(workdir),
            contextlib.ExitStack() as closing,
            failure.peer_errors_named(self.topology.cluster),
            self.program.written_back(),
        ):
            return start_run(
                self.program, self._evaluator, train, validation, steps, epochs, hooks, callbacks, closing
            ).run()

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
        self._refresh()
        return self._evaluator(source)

    @property
    def config(self) -> ExperimentConfig:
        """The whole configuration, options included."""
        return self.program.config

    @property
    def topology(self) -> Topology:
        """How the replicas lie on workers and devices."""
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
        """The model that is trained, under the strategy: on one device the one that was given, on several a copy."""
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
        """Follows layers that were frozen or unfrozen since the last call."""
        program = self.program.refreshed()
        if program is not self.program:
            self.program, self._evaluator = program, Evaluator(program)

    def _check_sources(self, train: inputs.Source, validation: inputs.Source | None) -> None:
        for role, source in (("train", train), ("validation", validation)):
            if source is not None and not isinstance(source, inputs.Source):
                raise ConfigError(
                    f"fit({role}=...): expected a tfpar.inputs.Source, got {type(source).__name__}. Create one with "
                    "tfpar.inputs.from_arrays(x, y), or tfpar.inputs.build_source."
                )
        validate_data(self.config, self.topology, train, validation)
        built = {"model": self.model, "integer_labels": self.program.integer_labels}
        validate_model(self.config, self.topology, train, validation, **built)


def _with_options(config: ExperimentConfig | None, options: Mapping[str, Any], optimizer: Any) -> ExperimentConfig:
    """The configuration with single options replaced, and what an optimizer argument implies."""
    flat = (config or ExperimentConfig()).as_flat_dict()
    if config is None:  # its defaults would record names of what was never used
        flat |= {"model": CUSTOM, "dataset": CUSTOM}
    flat |= options
    if isinstance(options.get("jit_compile"), bool):
        flat["jit_compile"] = str(options["jit_compile"]).lower()
    if optimizer is not None:
        flat["optimizer"] = optimizer if isinstance(optimizer, str) else CUSTOM
    return ExperimentConfig.from_flat_dict(flat)


def _deprecated_layout(options: dict[str, Any]) -> strategies.Runtime | None:
    """Takes the keyword of version 0.1.0 out of the options."""
    if "layout" in options:
        warnings.warn("Trainer(layout=...) is deprecated; use runtime=...", DeprecationWarning, stacklevel=3)
    return options.pop("layout", None)
