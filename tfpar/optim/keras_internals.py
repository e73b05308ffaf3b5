"""Everything private of Keras that tfpar relies on. No other module uses a private name of Keras, except
`keras_compile.py`, which is about the arguments of `compile`.

`INTERNALS` lists the names, who needs them and why; `tests/optim/test_keras_internals.py` has a canary for each, and
finds private names that are used elsewhere. When a new Keras renames one, this file is what changes.
Four parts: the table; functions that read or call a name; `OptimizerView`, which names Keras' private hooks; views.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from keras.src.losses.loss import squeeze_or_expand_to_same_rank

KERAS = "3.15"


class Internal(NamedTuple):
    """One private name.

    Attributes:
      name: The name in Keras.
      owner: The object that has it.
      user: The part of tfpar that needs it.
      why: The behaviour that tfpar relies on, and why no public name is enough.
    """

    name: str
    owner: str
    user: str
    why: str


INTERNALS = (
    # Read or called
    Internal("_trainable_variables", "Optimizer", "pure update, drop-in", "what it was built with, in order"),
    Internal("_get_variable_index", "Optimizer", "drop-in, LARS", "place of a variable among them"),
    Internal("_distribution_strategy", "Optimizer", "Trainer, offload", "in whose scope it was made; places its state"),
    Internal("_model_variables_moving_average", "Optimizer", "evaluation, pure update", "EMA, in that order"),
    Internal("_update_model_variables_moving_average", "Optimizer", "pure update", "moves the EMA"),
    Internal("_use_weight_decay", "Optimizer", "all updates, LARS", "whether a variable is excluded from decay"),
    Internal("_exclude_from_weight_decay", "Optimizer", "copying an optimizer", "keys of excluded variables"),
    Internal("_exclude_from_weight_decay_pattern", "Optimizer", "copying an optimizer", "pattern of excluded names"),
    Internal("_distributed_tf_update_step", "Optimizer", "server update", "`update_step` where a variable is placed"),
    Internal("_flatten_layers", "Layer", "models, Trainer", "all layers, also inside wrappers and custom layers"),
    Internal("_trainable_variables", "Layer", "sidecar", "weights made to learn, whatever `trainable` is now"),
    Internal("_metrics", "Layer", "model's own metrics", "metrics made as attributes, without those of `compile`"),
    Internal("_call_has_training_arg", "Layer", "calling a model", "how `fit` decides whether to pass `training`"),
    Internal("_value", "Variable", "tensor parallelism", "the TensorFlow variable, made anew under a strategy"),
    Internal("_shape", "Variable", "tensor parallelism", "its shape, then that of a part"),
    Internal("_ndim", "Variable", "tensor parallelism", "length of the shape"),
    Internal("_initialize", "Variable", "tensor parallelism", "makes the TensorFlow variable"),
    Internal("_remat_mode", "Layer", "checking a model", "whether the layer was made in a `RematScope`"),
    Internal("_direction", "Metric", "callbacks", "whether more of it is better, for callbacks that monitor it"),
    Internal("_keras_mask", "tensor", "objective", "a mask that the model's outputs carry"),
    Internal("squeeze_or_expand_to_same_rank", "keras.src.losses.loss", "objective", "as `compile` aligns labels"),
    Internal("scale_loss_for_distribution", "keras.src.losses.loss", "calling a model", "divides losses by replicas"),
    Internal("unscale_loss_for_distribution", "keras.src.losses.loss", "calling a model", "undoes that for metrics"),
    Internal("seed_generator_state", "SeedGenerator", "core, sidecar, step", "name of its state, two integers"),
    # Hooks that a view overrides, in the order in which `Optimizer.apply` calls them
    Internal("_backend_apply_gradients", "Optimizer", "pure update, drop-in", "`apply` after filtering gradients"),
    Internal("_clip_gradients", "Optimizer", "pure update, drop-in", "called where it updates, on accumulated means"),
    Internal("_apply_weight_decay", "Optimizer", "pure, server update, LARS", "called after clipping"),
    Internal("_backend_update_step", "Optimizer", "pure, server update", "called with the learning rate; all-reduces"),
    Internal("_get_current_learning_rate", "Optimizer", "pure, server update", "all that `learning_rate` reads"),
    Internal("_var_key", "Optimizer", "pure update", "identifies a variable, also one that a scope substitutes"),
    # Behaviour without its own name
    Internal("__dict__", "Optimizer", "views", "holds all of its state, so that a copy of it shares every variable"),
    Internal("__class__", "Optimizer", "drop-in", "what serialisation takes for the class"),
)


# Reading and calling


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that a built optimizer was built with, in order."""
    return list(optimizer._trainable_variables)


def variable_index(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """The place of a variable, Keras' or TensorFlow's, among `trainable_variables`."""
    return optimizer._get_variable_index(variable)


def variable_key(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> Any:
    """The key by which an optimizer identifies a variable."""
    return optimizer._var_key(variable)


def build_here(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Builds an optimizer with its state on the current device instead of next to the variables."""
    strategy, beside = optimizer._distribution_strategy, SimpleNamespace(colocate_vars_with=contextlib.nullcontext)
    set_untracked(optimizer, _distribution_strategy=SimpleNamespace(extended=beside))
    try:
        optimizer.build(variables)
    finally:
        set_untracked(optimizer, _distribution_strategy=strategy)


def strategy_of(optimizer: keras.optimizers.Optimizer) -> tf.distribute.Strategy:
    """The strategy in whose scope an optimizer was made."""
    return optimizer._distribution_strategy


def moving_averages(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable | None]:
    """The moving average of each of `trainable_variables`, of an optimizer with `use_ema`."""
    return list(optimizer._model_variables_moving_average)


def move_averages(
    optimizer: keras.optimizers.Optimizer,
    beside: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """Moves the averages towards the variables, each in the context that `beside` returns for the variable's value."""
    averages = optimizer._model_variables_moving_average
    try:
        for variable, average in zip(optimizer._trainable_variables, averages, strict=True):
            # Keras pairs the variables that it is given with the averages from the first on.
            set_untracked(optimizer, _model_variables_moving_average=[average])
            with beside(variable.value):
                optimizer._update_model_variables_moving_average([variable])
    finally:
        set_untracked(optimizer, _model_variables_moving_average=averages)


def clip(optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]) -> list[Any]:
    """Gradients clipped as the optimizer is told to (`clipnorm`, `clipvalue`, `global_clipnorm`)."""
    return optimizer._clip_gradients(gradients)


def apply_decay(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    """Decays weights in the optimizer's own way."""
    optimizer._apply_weight_decay(variables)


def is_decayed(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether a variable is not excluded from weight decay."""
    return optimizer._use_weight_decay(variable)


def decayed(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> list[Any]:
    """Those of the variables that weight decay acts on: none without a `weight_decay`."""
    return [] if optimizer.weight_decay is None else [each for each in variables if is_decayed(optimizer, each)]


def excludes_variables(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether single variables, not names, are excluded from weight decay."""
    return bool(getattr(optimizer, "_exclude_from_weight_decay", None))


def excluded_names(optimizer: keras.optimizers.Optimizer) -> str:
    """The pattern of variable names that are excluded from weight decay; empty for none."""
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    return pattern.pattern if pattern is not None else ""


def update_all(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any], variables: Sequence[Any], rate: Any
) -> None:
    """Updates variables in the optimizer's own way, after clipping and decay."""
    optimizer._backend_update_step(gradients, variables, rate)


def update_where_placed(
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
    rate: Any,
) -> None:
    """Runs `update_step` on the device of each variable; asks for no replica context."""
    pairs = [(gradient, variable.value) for gradient, variable in zip(gradients, variables, strict=True)]
    optimizer._distributed_tf_update_step(strategy, pairs, rate)


def all_layers(
    model: keras.layers.Layer, *, include_self: bool = True, recursive: bool = True
) -> list[keras.layers.Layer]:
    """All layers of a model or layer. `model.layers` stops at wrappers and custom layers; this does not."""
    return list(model._flatten_layers(include_self=include_self, recursive=recursive))


def weights_made_to_learn(layer: keras.layers.Layer) -> list[keras.Variable]:
    """A layer's own weights that are trainable unless `trainable=False` is set; without its state."""
    return list(layer._trainable_variables)


def mask_of(tensor: Any) -> Any:
    """The mask that a Keras model or loss set on a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> Any:
    """Sets the mask of a tensor, unless it is None; returns the tensor."""
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


def metrics_made_in(layer: keras.layers.Layer) -> list[keras.metrics.Metric]:
    """Metrics that a layer or model has as attributes; those of its sublayers and of `compile` are not among them."""
    return list(layer._metrics)


def direction_of(metric: keras.metrics.Metric) -> str:
    """`max` or `min`: the direction of improvement for callbacks that monitor this metric. Empty if the metric has
    none."""
    return {"up": "max", "down": "min"}.get(getattr(metric, "_direction", None) or "", "")


def takes_training(layer: keras.layers.Layer) -> bool:
    """Whether the layer's `call` has an argument `training`."""
    return bool(layer._call_has_training_arg)


def is_rematerialized(layer: keras.layers.Layer) -> bool:
    """Whether a layer computes its activations again in the backward pass."""
    mode = layer._remat_mode
    return mode is not None and mode.mode is not None


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether this is the state of a `keras.random.SeedGenerator` (two integers of that name)."""
    return variable.name == "seed_generator_state" and tuple(variable.shape) == (2,)


def replace_value(variable: keras.Variable, value: np.ndarray) -> None:
    """Gives a variable a new TensorFlow variable, made under the current strategy, of this value and shape."""
    variable._shape, variable._ndim = tuple(value.shape), value.ndim
    variable._value, variable._initializer = None, None
    variable._initialize(tf.constant(value, variable.dtype))


def matching_ranks(y: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Labels `[m]` and outputs `[m, 1]`, or the other way, with the rank of one another, as in Keras' `compile`."""
    return squeeze_or_expand_to_same_rank(y, outputs)


class _Scaling(threading.local):
    """Whether Keras scales losses in this thread: MirroredStrategy traces every replica in a separate thread."""

    on = True


_scaling = _Scaling()


@contextlib.contextmanager
def unscaled_losses() -> Iterator[None]:
    """In this context loss objects return means over the batch that they are given, as on one replica.

    Keras 3.15 divides the result of `keras.losses.Loss.__call__` by the number of replicas, because its own step adds
    up gradients; a function such as `ops.mean` is not divided. The step here weights replicas by their examples.
    """
    before, _scaling.on = _scaling.on, False
    try:
        yield
    finally:
        _scaling.on = before


def _where_scaling_is_on(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(scale)
    def scale_or_not(value: Any) -> Any:
        return scale(value) if _scaling.on else value

    return scale_or_not


keras_loss.scale_loss_for_distribution = _where_scaling_is_on(keras_loss.scale_loss_for_distribution)
keras_loss.unscale_loss_for_distribution = _where_scaling_is_on(keras_loss.unscale_loss_for_distribution)


def set_untracked(owner: Any, **attributes: Any) -> None:
    """Sets attributes past Keras' and TensorFlow's `__setattr__`, which look for variables to track."""
    vars(owner).update(attributes)


# Hooks


class OptimizerView(keras.optimizers.Optimizer):
    """Base of views: optimizers that update in another way than their class. `view_of` and `become` make them.

    Keras calls its hooks by private names. Each has a name here that starts with `view_`, which a view overrides. Hooks
    that are not overridden behave as in Keras. The learning rate is that of `view_of`, if one was given.
    """

    _view_rate: Any = None

    def view_apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Applies gradients: clipping, decay, update, moving averages; accumulation, where it is on."""
        super()._backend_apply_gradients(gradients, variables)

    def view_clip(self, gradients: Sequence[Any]) -> Any:
        """Clips gradients; those of an accumulation are their mean, and come here only where it updates."""
        return super()._clip_gradients(gradients)

    def view_decay(self, variables: Sequence[Any]) -> None:
        """Decays weights."""
        super()._apply_weight_decay(variables)

    def view_update(self, gradients: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
        """Updates variables."""
        super()._backend_update_step(gradients, variables, rate)

    def view_key(self, variable: Any) -> Any:
        """Identifies a variable."""
        return super()._var_key(variable)

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        self.view_apply(grads, trainable_variables)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        return self.view_clip(grads)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        self.view_decay(variables)

    def _backend_update_step(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any
    ) -> None:
        self.view_update(grads, trainable_variables, learning_rate)

    def _get_current_learning_rate(self) -> Any:
        return super()._get_current_learning_rate() if self._view_rate is None else self._view_rate

    def _var_key(self, variable: Any) -> Any:
        return self.view_key(variable)


class DecayInStep(keras.optimizers.Optimizer):
    """Base of an optimizer whose `update_step` decays weights itself."""

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Nothing."""


# Making views


def view_of(
    optimizer: keras.optimizers.Optimizer, way: Any, learning_rate: Any = None, **attributes: Any
) -> keras.optimizers.Optimizer:
    """The same optimizer, sharing every variable and attribute, with another way to update.

    Overrides of the optimizer's own class (Nadam, Muon) still apply, and call `way` with `super()`: in the method
    resolution order `way` comes after that class and before Keras' TensorFlow backend.

    Args:
      optimizer: A built optimizer; it is not changed.
      way: An `OptimizerView`, what updates differently.
      learning_rate: Replaces the optimizer's learning rate; None for its own.
      **attributes: What `way` needs.
    """
    kind: Any = type(optimizer)
    view: Any = object.__new__(_view_class(kind, way))
    set_untracked(view, **vars(optimizer) | {"_view_rate": learning_rate} | attributes)
    return view


def become(optimizer: keras.optimizers.Optimizer, way: Any, **attributes: Any) -> None:
    """Makes this very object update in another way. For Keras and for a saved model it keeps its class.

    `way` comes before the optimizer's own class in the method resolution order. Serialisation looks at `__class__` and
    gets the plain class; what is made from a configuration is plain again.

    Args:
      optimizer: Is changed.
      way: An `OptimizerView`, what updates differently.
      **attributes: What `way` needs.
    """
    set_untracked(optimizer, **attributes)
    kind: Any = type(optimizer)
    # TensorFlow's __setattr__ would look for things to track.
    object.__setattr__(optimizer, "__class__", _disguised_class(kind, way))


@functools.cache
def _view_class(kind: Any, way: Any) -> type:
    return type(f"{way.__name__}{kind.__name__}", (kind, way), {})


@functools.cache
def _disguised_class(kind: Any, way: Any) -> type:
    plain = {
        "__class__": property(lambda self: kind),
        "from_config": lambda config, custom_objects=None: kind.from_config(config, custom_objects),
    }
    return type(f"{way.__name__}{kind.__name__}", (way, kind), plain)
