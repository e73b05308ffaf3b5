"""Replicas on one device each, whose optimizer keeps its state in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfpar.config import ConfigError, ExperimentConfig
from tfpar.optim import keras_internals, optimizers
from tfpar.training.core import Core
from tfpar.training.offload.step import OffloadedStep
from tfpar.training.optimizer_spec import OptimizerSpec
from tfpar.training.placing.base import Placing
from tfpar.training.step import TrainStep

import keras
import tensorflow as tf

HOST = "CPU:0"


class OffloadingPlacing(Placing):
    """Weights on the device, optimizer state on the host."""

    own_step = "--offload"

    def optimizer(
        self,
        spec: OptimizerSpec,
        config: ExperimentConfig,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
    ) -> keras.optimizers.Optimizer:
        """See `Placing`."""
        del strategy  # in its scope, state would be made on the device
        with tf.device(HOST):
            optimizer = spec.create(config)
            keras_internals.build_here(optimizer, model.trainable_variables)
        return optimizer

    def recreated(
        self, optimizer: keras.optimizers.Optimizer, model: keras.Model, strategy: tf.distribute.Strategy
    ) -> keras.optimizers.Optimizer:
        """See `Placing`."""
        del strategy
        weights: Sequence[keras.Variable] = model.trainable_variables
        with tf.device(HOST):
            return optimizers.recreate_for(optimizer, weights, build=keras_internals.build_here)

    def check(self, optimizer: keras.optimizers.Optimizer, core: Core) -> None:
        """See `Placing`."""
        if core.overwritten:
            raise ConfigError(f"--offload: model {core.model.name!r} has float8 layers. Leave it out.")
        if optimizer.global_clipnorm or optimizer.use_ema:
            name = "use_ema" if optimizer.use_ema else "global_clipnorm"
            raise ConfigError(
                f"--offload: {name} of {type(optimizer).__name__} needs all weights at once, which are updated block "
                "by block. Leave one of them out; --clip_norm clips by the norm of all gradients."
            )

    def step_class(self, model: keras.Model) -> Callable[..., TrainStep]:
        """See `Placing`."""
        del model
        return OffloadedStep
