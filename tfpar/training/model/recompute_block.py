"""One block of a model whose activations are computed again in the backward pass.

This uses `tf.recompute_grad`, which does not support Keras' scopes: weights reach a layer through a `StatelessScope`,
not as arguments, and so would get no gradient; and the second call happens after the scopes of the first have ended. So
the weights become arguments, and the second call runs in the state that Keras had in the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.models.normalization import current_example_weights, example_weights
from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel import weight_shards
from tfpar.parallel.tensor.obstacles import check_read
from tfpar.training.model.random_ops import without_draws
from tfpar.training.model.sharded_lookup import rows_of_lookup

import keras
import tensorflow as tf


def recomputing_call(
    model: keras.Model, layer: keras.layers.Layer, plain: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Replaces a layer's `call`."""
    if not in_stateless_call((args, kwargs)):
        return plain(*args, **kwargs)
    if _looks_up(layer, args) and any(map(weight_shards.is_sharded, layer.variables)):
        return _with_gathered_weights(layer, plain, args, kwargs)
    return recomputed(model, layer.variables, plain, args, kwargs, layer.name)


def _looks_up(layer: keras.layers.Layer, args: tuple[Any, ...]) -> bool:
    """Whether a call takes vectors from a table, whose gradient needs no value of the table."""
    inputs = args[0] if args else None
    has_table = any(weight.name == "embeddings" for weight in layer.weights)
    return has_table and isinstance(inputs, tf.Tensor) and inputs.dtype.is_integer


def _with_gathered_weights(
    layer: keras.layers.Layer, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a layer with its weights gathered for this call alone; the backward pass does not call it again."""
    outer = keras_calls.innermost_scope()
    assert outer is not None
    values, weights = dict(outer.state_mapping), layer.variables
    if lookup := rows_of_lookup(layer, args[0], values):
        table, values[id(table)], numbers = lookup
        args, weights = (numbers, *args[1:]), [weight for weight in weights if weight is not table]
    values = weight_shards.with_gathered(values, weights, [values[id(weight)] for weight in weights], args)
    with _BlockScope(values, set()) as scope:
        outputs = plain(*args, **kwargs)
    for update in scope.updates.values():
        outer.add_update(update)
    for loss in scope.losses:
        keras_calls.add_loss(layer, outer, loss)
    return outputs


def in_stateless_call(arguments: Any) -> bool:
    """Whether values of variables are those of a scope, no block is being recomputed, and arguments are tensors."""
    scope = keras_calls.innermost_scope()
    symbolic = any(isinstance(part, keras.KerasTensor) for part in tf.nest.flatten(arguments))
    return scope is not None and bool(scope.state_mapping) and not isinstance(scope, _BlockScope) and not symbolic


class _BlockScope(keras.StatelessScope):
    """Variables as they were at the first call of a block; records the block's assignments and its other reads."""

    def __init__(self, values: dict[int, tf.Tensor], learning: set[int]) -> None:
        super().__init__(collect_losses=True)
        self.state_mapping = values
        self.updates: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self.others: dict[int, keras.Variable] = {}
        self._learning, self._gathered = learning, weight_shards.Gathered()

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        super().add_update(update)
        self.updates[id(update[0])] = update

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        if id(variable) in self._learning:
            self.others[id(variable)] = variable
        check_read(variable)
        return self._gathered.of(variable, super().get_current_value(variable))


def recomputed(
    model: keras.Model,
    variables: Sequence[keras.Variable],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
) -> Any:
    """Calls a function of tensors, and computes it again when its gradient is computed.

    Args:
      model: The model, whose trainable variables have gradients.
      variables: The variables that the function reads, as far as they are known.
      function: The function to call.
      args: Its arguments, nested structures with tensors.
      kwargs: Its arguments by name.
      name: Name of the block, for messages.

    Raises:
      ConfigError: The function assigns a trainable weight, or draws numbers that are others when it is computed again.
    """
    outer = keras_calls.innermost_scope()
    assert outer is not None
    learning = {id(variable) for variable in model.trainable_variables}
    weights = {id(variable): variable for variable in variables if id(variable) in learning}
    while True:
        values = dict(outer.state_mapping)
        frozen = [each for each in variables if id(each) not in learning and weight_shards.is_sharded(each)]
        block = _Block(values, weights, frozen, learning, function, (args, kwargs), name)
        results = tf.recompute_grad(block)(*block.arguments)
        if not block.others:
            break
        # It reads a weight of another layer, such as a tied embedding, whose gradient must be computed as well.
        weights = weights | block.others
    for variable, value in block.updates:
        if id(variable) in learning:
            raise ConfigError(
                f"--recompute: block {name!r} assigns its trainable weight {variable.path!r} in the forward pass, "
                "which the backward pass must not repeat. Name other layers with --recompute=REGEX; --shard=weights "
                "has blocks of its own, so leave it out."
            )
        outer.add_update((variable, value))
    count = len(results) - block.losses
    for loss in results[count:]:
        keras_calls.add_loss(model, outer, loss)
    return block.outputs(results[:count])


class _Block:
    """A call of a block, as a function of the floating-point tensors that it reads."""

    def __init__(
        self,
        values: dict[int, tf.Tensor],
        weights: dict[int, keras.Variable],
        frozen: list[keras.Variable],
        learning: set[int],
        function: Callable[..., Any],
        given: Any,
        name: str,
    ) -> None:
        self._values = values
        self._weights, self._frozen = weights, frozen
        self._elsewhere = learning - weights.keys()
        self._function = function
        self._given, self._name = given, name
        self._parts = tf.nest.flatten(given)
        # Copied now, because attention removes the masks of its arguments.
        self._masks_given = [keras_internals.mask_of(part) for part in self._parts]
        self._places = [place for place, part in enumerate(self._parts) if _is_float(part)]
        self._state = keras_calls.thread_state()
        self._example_weights = current_example_weights()
        self._first = True
        self.others: dict[int, keras.Variable] = {}
        self.updates: list[tuple[keras.Variable, tf.Tensor]] = []
        self.losses = 0
        self._structure: Any = None
        self._outputs: list[Any] = []
        self._masks: list[Any] = []

    @property
    def arguments(self) -> list[tf.Tensor]:
        """Inputs, then weights."""
        return [*(self._parts[place] for place in self._places), *(self._values[each] for each in self._weights)]

    def __call__(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """The floating-point outputs, then the losses."""
        parts = list(self._parts)
        for place, tensor in zip(self._places, tensors[: len(self._places)], strict=True):
            parts[place] = keras_internals.set_mask(tensor, self._masks_given[place])
        args, kwargs = tf.nest.pack_sequence_as(self._given, parts)
        weights = [*self._weights.values(), *self._frozen]
        given = [*tensors[len(self._places) :], *(self._values[id(variable)] for variable in self._frozen)]
        inputs = [part for part in parts if isinstance(part, tf.Tensor)]
        values = weight_shards.with_gathered(self._values, weights, given, inputs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(weight_shards.shown_gathered(weights))
            stack.enter_context(keras_calls.in_thread_state(self._state))
            if self._example_weights is not None:
                stack.enter_context(example_weights(self._example_weights))
            what = f"--recompute, or a block of --shard=weights: {self._name!r}"
            stack.enter_context(without_draws(what, "in the backward pass, which computes it again"))
            scope = stack.enter_context(_BlockScope(values, self._elsewhere))
            outputs = self._function(*args, **kwargs)
        flat = tf.nest.flatten(outputs)
        if self._first:
            self._first = False
            self._structure, self._outputs = outputs, flat
            self._masks = [keras_internals.mask_of(part) for part in flat]
            self.others, self.updates = scope.others, list(scope.updates.values())
            self.losses = len(scope.losses)
        return [*(part for part in flat if _is_float(part)), *map(tf.convert_to_tensor, scope.losses)]

    def outputs(self, results: Sequence[tf.Tensor]) -> Any:
        """The outputs in their structure, with those that carry a gradient taken from `results`."""
        carried: Iterator[tf.Tensor] = iter(results)
        parts = [next(carried) if _is_float(part) else part for part in self._outputs]
        for part, mask in zip(parts, self._masks, strict=True):
            keras_internals.set_mask(part, mask)
        return tf.nest.pack_sequence_as(self._structure, parts)


def _is_float(part: Any) -> bool:
    return isinstance(part, tf.Tensor) and part.dtype.is_floating
