"""One update of any Keras optimizer as a pure function of tensors.

The training step compiles it with XLA and runs it on every replica, with no communication between replicas.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from tfpar.optim import keras_internals
from tfpar.optim.keras_internals import OptimizerView
from tfpar.optim.optimizers import ELEMENTWISE, check_optimizer

import keras
import tensorflow as tf


def pure_apply(
    optimizer: keras.optimizers.Optimizer,
    optimizer_variables: Sequence[tf.Tensor],
    params: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor | None],
    learning_rate: tf.Tensor | None = None,
    *,
    factor: tf.Tensor | None = None,
    group_bytes: int = 0,
    beside: Callable[[tf.Tensor], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    whole: WholeTensors | None = None,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """One optimizer update on tensors; no variable is read or assigned, nothing is communicated.

    It is the optimizer's own update in every respect: clipping, weight decay, moments, EMA, constraints of the
    variables, the count of iterations. It runs eagerly, in a graph, under XLA and in a replica context.

    Args:
      optimizer: A built optimizer that passes `optimizers.check`.
      optimizer_variables: Values of `optimizer.variables`, in order.
      params: Values of the trainable variables the optimizer was built with, in order.
      gradients: Gradients of `params`; None (no path from the loss) leaves a parameter as it is.
      learning_rate: float32 [] that replaces the optimizer's learning rate, in this update only.
        None: the optimizer's own variable, or its own schedule at its count of iterations.
      factor: float32 [] that gradients are multiplied by first.
      group_bytes: In a graph that runs op by op, groups of weights of this size are updated one after the other, so
        that only one group's temporary tensors exist at a time. 0: in any order. Optimizers that are not elementwise,
        or that clip, update in any order.
      beside: Returns the context for operations on a tensor, such as its device.
      whole: Updates the weights of which the optimizer needs more than `params` has.

    Returns:
      The new values of `params` and of `optimizer_variables`, in the same order.

    Raises:
      ConfigError: An optimizer that does not pass `optimizers.check`.
      ValueError: The optimizer is not built, or a list does not fit it.
    """
    _check_arguments(optimizer, optimizer_variables, params, gradients)
    trainable, variables = keras_internals.trainable_variables(optimizer), optimizer.variables
    # In the scope a variable's value is a tensor, which Keras can make no key from.
    keys = {id(variable): keras_internals.variable_key(optimizer, variable) for variable in trainable}
    view = keras_internals.view_of(
        *(optimizer, PureUpdate, learning_rate),
        _keys=keys,
        _beside=beside,
        _factor=factor,
        _group_bytes=group_bytes if updates_each_alone(optimizer) else 0,
        _whole=whole,
    )
    mapping = [*zip(trainable, params, strict=True), *zip(variables, optimizer_variables, strict=True)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        keras_internals.set_untracked(view, _scope=scope)
        apply_reached(view, gradients, trainable)
    return (
        [scope.get_current_value(variable) for variable in trainable],
        [scope.get_current_value(variable) for variable in variables],
    )


def apply_reached(view: Any, gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> None:
    """Applies the gradients that are not None, of which Keras would warn for each device and trace, and leaves out
    weights without elements, which another worker of a pipeline updates."""
    reached = (pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None)
    pairs = [(gradient, own) for gradient, own in reached if math.prod(own.shape)]
    if pairs:
        # Gradients of embeddings are IndexedSlices; XLA and the rules below want them dense.
        view.apply([tf.convert_to_tensor(gradient) for gradient, _ in pairs], [own for _, own in pairs])
    else:  # Keras would not count the iteration, which all devices count
        view.view_apply([], [])
        view.iterations.assign_add(1)


def _check_arguments(
    optimizer: keras.optimizers.Optimizer,
    optimizer_variables: Sequence[tf.Tensor],
    params: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor | None],
) -> None:
    """Raises the errors of `pure_apply`."""
    if not optimizer.built:
        raise ValueError(
            f"{optimizer.name} has no variables yet. Call optimizer.build(model.trainable_variables) before the update."
        )
    trainable = keras_internals.trainable_variables(optimizer)
    for name, given, known in (
        ("optimizer_variables", optimizer_variables, optimizer.variables),
        ("params", params, trainable),
        ("gradients", gradients, trainable),
    ):
        if len(given) != len(known):
            raise ValueError(f"{name} holds {len(given)} tensors, but {optimizer.name} was built for {len(known)}.")
    check_optimizer(optimizer)


class WholeTensors(abc.ABC):
    """Weights that an optimizer updates as a whole where each device has a part of them; false if there are none."""

    @abc.abstractmethod
    def __contains__(self, variable: keras.Variable) -> bool:
        """Whether a weight is one of them."""

    @abc.abstractmethod
    def update(self, view: PureUpdate, gradients: dict[int, tf.Tensor], rate: Any) -> None:
        """Calls `update_step` with whole values, and puts the parts of the new ones.

        Args:
          view: What updates. In its scope, variables have the values of this device's parts.
          gradients: The parts of the gradients, by `id` of the weight; those of other weights, too.
          rate: The learning rate.
        """


def updates_each_alone(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the update of a weight reads nothing of the others."""
    clips = optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    return type(optimizer) in ELEMENTWISE and not clips


class PureUpdate(OptimizerView):
    """Replaces what Keras' TensorFlow backend adds to an optimizer by plain tensor arithmetic.

    Keras 3.15.1 refuses `stateless_apply` on TensorFlow: its `TFOptimizer` all-reduces gradients, enters
    `merge_call`, and assigns `tf.Variable`s. The methods below put Keras variables in a `StatelessScope` back
    in their place.

    If weights are updated in groups, their gradients are multiplied and they are decayed with their group, not before.
    """

    _factor: tf.Tensor | None = None
    _group_bytes = 0
    _decays_later: Sequence[keras.Variable] = ()
    _whole: WholeTensors | None = None
    _scope: keras.StatelessScope | None = None

    def assign(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Within the scope."""
        if self._whole:
            self.put(variable, value)
        else:
            variable.assign(value)

    def assign_add(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Within the scope."""
        self.assign(variable, variable.value + tf.cast(value, variable.dtype))

    def assign_sub(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Within the scope."""
        self.assign(variable, variable.value - tf.cast(value, variable.dtype))

    def put(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Assigns within the scope; the value may have another shape than the variable."""
        assert self._scope is not None
        self._scope.add_update((variable, tf.cast(value, variable.dtype)))

    def view_key(self, variable: keras.Variable) -> Any:
        """The key that the optimizer has outside the scope."""
        return self._keys[id(variable)]

    def view_decay(self, variables: Sequence[keras.Variable]) -> None:
        """Decoupled decay, `w -= rate x decay x w`."""
        decayed = keras_internals.decayed(self, variables)
        if self._group_bytes:
            keras_internals.set_untracked(self, _decays_later=decayed)
            return
        for variable in decayed:
            self._decay(variable)

    def view_update(self, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable], rate: Any) -> None:
        """The optimizer's rule, variable by variable."""
        if self._whole:
            by_variable = dict(zip(map(id, variables), gradients, strict=True))
            self._whole.update(self, by_variable, rate)
            variables = [variable for variable in variables if variable not in self._whole]
            gradients = [by_variable[id(variable)] for variable in variables]
        later = {id(variable) for variable in self._decays_later}
        before: list[tf.Tensor] = []
        group: list[tf.Tensor] = []
        size = 0
        for gradient, variable in zip(gradients, variables, strict=True):
            if self._group_bytes and size >= self._group_bytes:
                before, group, size = group, [], 0
            with tf.control_dependencies(before), self._beside(gradient):
                if id(variable) in later:
                    self._decay(variable)
                self.update_step(self._scaled(gradient) if self._group_bytes else gradient, variable, rate)
            group.append(variable.value)
            size += tf.as_dtype(variable.dtype).size * math.prod(variable.shape)

    def view_apply(self, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> None:
        """What Keras does, without accumulation and without branches."""
        if not self._group_bytes:
            gradients = [self._scaled(gradient) for gradient in gradients]
        gradients = keras_internals.clip(self, gradients) if gradients else []
        keras_internals.apply_decay(self, variables)
        keras_internals.update_all(self, gradients, variables, self.learning_rate)
        if not self.use_ema:
            return
        keras_internals.move_averages(self, self._beside)
        if self.ema_overwrite_frequency:
            # Keras assigns inside a cond, which would leak the branch's tensors into the scope.
            overwrite = tf.equal((self.iterations + 1) % self.ema_overwrite_frequency, 0)
            averages = keras_internals.moving_averages(self)
            for variable, average in zip(keras_internals.trainable_variables(self), averages, strict=True):
                if average is not None:
                    variable.assign(tf.where(overwrite, average.value, variable.value))

    def _scaled(self, gradient: tf.Tensor) -> tf.Tensor:
        if self._factor is None:
            return gradient
        with self._beside(gradient):
            return gradient * self._factor

    def _decay(self, variable: keras.Variable) -> None:
        with self._beside(variable.value):
            rate = tf.cast(self.learning_rate, variable.dtype)
            variable.assign_sub(variable.value * tf.cast(self.weight_decay, variable.dtype) * rate)
