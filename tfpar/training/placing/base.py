"""Places the parts of a replica: by default, all on its one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tfpar import models
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.exchange import DevicesOfReplica
from tfpar.exchange.reducer import GatheredWeights
from tfpar.optim import optimizers
from tfpar.optim.keras_calls import finalize_states
from tfpar.optim.keras_deferred import comes_from, is_deferred, made_deferred
from tfpar.parallel.topology import Topology
from tfpar.training.core import Core
from tfpar.training.model.building import Original, build_model, scope_of
from tfpar.training.optimizer_spec import OptimizerSpec
from tfpar.training.step import TrainStep

import keras
import numpy as np
import tensorflow as tf


class Placing:
    """A replica on one device. Subclasses are for replicas of several devices.

    Attributes:
      several: Whether devices communicate within a replica's programs, so that each has its own program.
      in_segments: Whether a pass is several programs on one device, so that some gradients are ready before others.
      segments: The number of these programs that `--jit_segments=auto` chose; 0 if it chose none.
      own_step: The option that changes the step of supervised training; empty if none does.
      topology: The topology of a placement over several devices; None if each replica has all its parts on one device.
      has_outputs: Whether this worker has the model's outputs; if several have the same, whether its outputs count.
      adds_sums: Whether this worker's sums of an evaluation count.
      core_class: The class that wraps the model as a pure function.
    """

    several = False
    in_segments = False
    segments = 0
    own_step = ""
    topology: Topology | None = None
    has_outputs = True
    adds_sums = True
    core_class: type[Core] = Core
    _exchanges_in_update = False  # whether devices exchange tensors of which the optimizer needs the whole

    def scope(
        self, model: keras.Model | Callable[[], keras.Model], strategy: tf.distribute.Strategy
    ) -> contextlib.AbstractContextManager[Any]:
        """The scope in which the model, its optimizer and its metrics are created."""
        return scope_of(model, strategy)

    def build_first(
        self, model: keras.Model | Callable[[], keras.Model], strategy: tf.distribute.Strategy, *, announced: bool
    ) -> tuple[keras.Model, Original | None] | None:
        """The result of `build_model`, built outside the scope, if the model must be moved to its devices; otherwise
        None."""
        if self.topology is None:
            return None
        made = build_on_host(model, strategy, announced=announced)
        _take_values_of_first_worker(made[0], self.topology)
        return made

    def place(self, model: keras.Model, config: ExperimentConfig, *, announced: bool) -> models.ModelSummary | None:
        """Moves the parts of a model from `build_first` to their devices. Call it in the scope.

        Args:
          model: Is changed.
          config: The experiment.
          announced: Whether to log the placement.

        Returns:
          Size and cost of the model, if it is known now and cannot be later.

        Raises:
          ConfigError: The model cannot be divided over several devices.
        """
        del model, config, announced
        return None

    def check(self, optimizer: keras.optimizers.Optimizer, core: Core) -> None:
        """Refuses an optimizer, built for the model, or a model that these devices cannot train.

        Raises:
          ConfigError: With what to use.
        """

    def check_loss(self, core: Core, input_spec: Any, label_spec: Any) -> None:
        """Refuses a loss that these devices would compute otherwise than one.

        Args:
          core: The core.
          input_spec: Structure of `tf.TensorSpec`, of one example.
          label_spec: The same of the labels.

        Raises:
          ConfigError: With what to use.
        """

    def within(self) -> contextlib.AbstractContextManager[Any]:
        """For a replica context: operations traced in this context belong to the program of its devices."""
        return contextlib.nullcontext()

    def optimizer(
        self,
        spec: OptimizerSpec,
        config: ExperimentConfig,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
    ) -> keras.optimizers.Optimizer:
        """The optimizer, built for the trainable variables of a model."""
        with self.scope(model, strategy):
            return spec.build(config, model.trainable_variables)

    def recreated(
        self, optimizer: keras.optimizers.Optimizer, model: keras.Model, strategy: tf.distribute.Strategy
    ) -> keras.optimizers.Optimizer:
        """A copy of the optimizer for the weights that are trainable now, see `optimizers.recreate_for`."""
        with self.scope(model, strategy):
            return optimizers.recreate_for(optimizer, model.trainable_variables)

    def step_class(self, model: keras.Model) -> Callable[..., TrainStep]:
        """The constructor of the step; takes the arguments of `TrainStep`."""
        del model
        return TrainStep

    def exchanged(self, model: keras.Model) -> DevicesOfReplica | None:
        """The arguments of the exchange that describe replicas of several devices."""
        del model
        return None

    def exchange_arguments(self, model: keras.Model) -> dict[str, Any]:
        """Arguments of `Exchange.build`: what is exchanged, and how."""
        return {"variables": model.trainable_variables, "per_device": self.exchanged(model)}

    def gathered(self, model: keras.Model, config: ExperimentConfig) -> GatheredWeights:
        """The bytes that replicas gather within a step, in addition to the exchange."""
        del model, config
        return GatheredWeights()

    def use_xla(self, compiles: bool) -> None:
        """Whether XLA compiles the programs of the individual devices."""
        del compiles

    @property
    def model_axis_bytes(self) -> int:
        """Bytes that a device sends to the others of its replica in a training step, once the step is traced."""
        return 0

    @property
    def xla_obstacle(self) -> str:
        """Why XLA cannot compile the passes; empty if it can."""
        return ""

    @property
    def can_compile_update(self) -> bool:
        """Whether XLA can compile the optimizer's update: not if devices communicate in it, or if one process has the
        devices of several stages, because a program changes variables of one device only."""
        return not self._exchanges_in_update


def build_on_host(
    model: keras.Model | Callable[[], keras.Model], strategy: tf.distribute.Strategy, *, announced: bool
) -> tuple[keras.Model, Original | None]:
    """Builds a model from which its parts are moved, so that it need not fit on a device.

    If possible, a variable of a model from a function gets its value only when it is moved, so that the model need not
    fit in the memory of the host either. Otherwise the whole model is in the host's memory first.

    Args:
      model: See `build_model`.
      strategy: The strategy under which it will be trained.
      announced: See `build_model`.

    Raises:
      ConfigError: See `build_model`; or the model was made under the strategy.
    """
    variables = model.variables if isinstance(model, keras.Model) else []
    if variables and strategy.extended.variable_created_in_scope(variables[0].value):
        raise ConfigError(
            "--mesh: the model was created under the strategy, whole on every device. Pass a function that builds it, "
            "or create it before the strategy."
        )
    with tf.device("CPU:0"):
        if not isinstance(model, keras.Model):
            built = made_deferred(lambda: build_model(model, strategy)[0], lambda built: built.variables)
            if built is not None:
                return built, None
        return build_model(model, strategy, announced=announced)


def _take_values_of_first_worker(model: keras.Model, topology: Topology) -> None:
    """Gives a model on the host the same values on all workers, as a strategy does for variables that it creates; a
    variable that has no value yet, when it is moved."""
    agreement = WorkerAgreement(world_group(topology.workers, topology.worker))

    def value_of_first(variable: keras.Variable) -> np.ndarray:
        kind = tf.as_dtype(variable.dtype).as_numpy_dtype
        own = variable.numpy() if topology.worker == 0 else np.zeros(variable.shape, kind)
        return agreement.broadcast([own])[0]

    for variable in model.variables if topology.workers > 1 else ():
        if is_deferred(variable):
            comes_from(variable, value_of_first)
        else:
            variable.assign(value_of_first(variable))
    finalize_states(model)
