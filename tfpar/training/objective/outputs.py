"""The structure, shapes and masks of a model's outputs, known before the first step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tfpar.collectives.replicas import summing_with
from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_compile, keras_internals
from tfpar.parallel.weight_shards import traced_whole
from tfpar.training.model.call import call_model, depends_on

import keras
import numpy as np
import tensorflow as tf

EXAMPLES = 7  # batch size for trials where any size will do


class Outputs(NamedTuple):
    """The outputs of a model.

    Attributes:
      structure: `tf.TensorSpec` of each output, with the requested number of examples.
      masked: For each output, flat: whether it carries a mask.
      adds_losses: Returns whether the model adds losses of its own (`add_loss`, regularisers), in training or always.
      names: Names of the outputs as Keras knows them, or None.
    """

    structure: Any
    masked: tuple[bool, ...]
    adds_losses: Callable[[], bool]
    names: list[str] | None


def outputs_of(model: keras.Model, input_spec: Any, examples: int) -> Outputs:
    """Describes the outputs of a model for inputs of a data set.

    A graph of layers with known sizes contains this description; any other model is traced once.

    Args:
      model: A built model.
      input_spec: Structure of `tf.TensorSpec`, of one example.
      examples: Size of dim 0 in the result.

    Raises:
      ConfigError: The model cannot be called on such inputs.
    """
    if any(spec.dtype == tf.string for spec in tf.nest.flatten(input_spec)) and not reads_strings(model):
        raise ConfigError(
            f"the model {model.name!r} cannot be called on examples of {_shapes(input_spec)}: it has no input of "
            "strings. Convert them to numbers in the data, or by a layer of the model, such as "
            'keras.layers.StringLookup after keras.Input(..., dtype="string").'
        )
    _check_number(model, input_spec)
    names = getattr(model, "output_names", None)
    graph = keras_compile.symbolic_outputs(model)
    if graph is not None and _takes(model, input_spec):
        tensors = keras.tree.flatten(graph)
        if all(None not in tensor.shape[1:] for tensor in tensors):
            specs = [tf.TensorSpec([examples, *tensor.shape[1:]], tensor.dtype) for tensor in tensors]
            masked = tuple(keras_internals.mask_of(tensor) is not None for tensor in tensors)
            structure = keras.tree.pack_sequence_as(graph, specs)
            # The graph does not know what `add_loss` adds inside a layer.
            return Outputs(structure, masked, lambda: _traced(model, input_spec, examples, names).adds_losses(), names)
    return _traced(model, input_spec, examples, names)


def _check_number(model: keras.Model, input_spec: Any) -> None:
    """Refuses more inputs than a model has: Keras (3.15) drops those that a Sequential model does not use."""
    known, given = getattr(model, "inputs", None), tf.nest.flatten(input_spec)
    if known and isinstance(input_spec, (list, tuple)) and len(given) > len(known):
        names = ", ".join(repr(tensor.name) for tensor in known)
        raise ConfigError(
            f"the model {model.name!r} has {len(known)} input{'s' * (len(known) > 1)} ({names}), but the examples have "
            f"{len(given)}: {_shapes(input_spec)}. A list of arrays is several inputs; give one array for each input "
            "of the model, and labels in y."
        )


def _takes(model: keras.Model, input_spec: Any) -> bool:
    """Whether examples have exactly the shapes of the inputs of a graph of layers. Others may still be accepted."""
    if isinstance(input_spec, Mapping) and {tensor.name for tensor in model.inputs} != {*input_spec}:
        return False  # keys that the model does not have, or that are not the names of its inputs
    shapes = [tuple(tensor.shape[1:]) for tensor in model.inputs]
    given = [tuple(spec.shape) for spec in tf.nest.flatten(input_spec)]
    return len(shapes) == len(given) and all(
        len(shape) == len(other) and all(size in (None, found) for size, found in zip(shape, other, strict=True))
        for shape, other in zip(sorted(shapes, key=str), sorted(given, key=str), strict=True)
    )


def _traced(
    model: keras.Model, input_spec: Any, examples: int, names: list[str] | None, *, training: bool = False
) -> Outputs:
    found: list[Outputs] = []

    def adds_losses_in_training() -> bool:
        return not training and _traced(model, input_spec, examples, names, training=True).adds_losses()

    def call(params: Any, state: Any, x: Any) -> None:
        outputs, _, losses = call_model(model, params, state, x, training=training)
        structure = keras.tree.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), outputs)
        masked = tuple(keras_internals.mask_of(part) is not None for part in keras.tree.flatten(outputs))
        adds_losses = bool(losses)
        found.append(Outputs(structure, masked, lambda: adds_losses or adds_losses_in_training(), names))

    _trace(model, input_spec, examples, call)
    return found[0]


def layers_adding_losses(model: keras.Model, input_spec: Any, examples: int) -> list[str]:
    """Names of the layers that add losses of examples in training (`add_loss`, `activity_regularizer`).

    Args:
      model: A built model. It is traced, unless all of its layers are Keras' or tfpar's own, whose code is known.
      input_spec: As for `outputs_of`.
      examples: As for `outputs_of`.

    Returns:
      The names; that of the model where nothing tells the layer. Empty if the model cannot be traced by itself.
    """
    layers = keras_internals.all_layers(model)
    found: list[str] = []

    def call(params: Any, state: Any, x: Any) -> None:
        roots = {leaf.ref() for leaf in tf.nest.flatten(x)}
        losses = [each for each in call_model(model, params, state, x, training=True).losses if depends_on(each, roots)]
        own = [layer.name for layer in layers if any(keras_calls.has_added(layer, loss) for loss in losses)]
        found.extend(own or [model.name] * bool(losses))

    if any(type(layer).__module__.partition(".")[0] not in ("keras", "tfpar") for layer in layers):
        with contextlib.suppress(ConfigError):
            _trace(model, input_spec, examples, call)
    return found


def _trace(model: keras.Model, input_spec: Any, examples: int, call: Callable[..., None]) -> None:
    """Traces a call `(params, state, x)` of a model, outside of replicas."""
    batch = tf.nest.map_structure(lambda spec: tf.TensorSpec([examples, *spec.shape], spec.dtype), input_spec)
    try:
        with traced_whole(model.variables), summing_with(lambda value: value):  # outside of replicas
            specs = [
                [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
                for variables in (model.trainable_variables, model.non_trainable_variables)
            ]
            tf.function(call, autograph=False).get_concrete_function(*specs, batch)
    except (ValueError, TypeError, KeyError, tf.errors.InvalidArgumentError) as error:
        # Keras surrounds the reason with the layer's name and its arguments, in colours.
        reason = keras_calls.without_surroundings(error).partition("Arguments received by")[0]
        reason = " ".join(reason.split())
        reason = re.sub(rf"(shape[= ]\(){examples}(?=,)", r"\1None", reason)  # a size that the data do not have
        raise ConfigError(
            f"the model {model.name!r} cannot be called on examples of {_shapes(input_spec)}: {reason}"
        ) from error


def check_inputs(model: keras.Model, input_spec: Any, accepted: list[Any]) -> None:
    """Refuses inputs on which a model cannot be called.

    Args:
      model: A built model.
      input_spec: Structure of `tf.TensorSpec`, of one example.
      accepted: Structures that were accepted before and need not be tried; `input_spec` is added.

    Raises:
      ConfigError: The model cannot be called on such inputs.
    """
    if input_spec not in accepted:
        outputs_of(model, input_spec, EXAMPLES)
        accepted.append(input_spec)


def check_labels(label_spec: Any, bound: Any) -> None:
    """Refuses labels that an objective, which is bound to others, cannot take.

    Args:
      label_spec: Structure of `tf.TensorSpec`, of one example.
      bound: That of the labels to which losses and metrics were assigned.

    Raises:
      ConfigError: Their structures, or the ranks of their leaves, differ.
    """
    try:
        keras.tree.assert_same_structure(bound, label_spec)
        pairs = zip(tf.nest.flatten(bound), tf.nest.flatten(label_spec), strict=True)
        same = all(one.shape.rank == other.shape.rank for one, other in pairs)
    except (ValueError, TypeError):
        same = False
    if not same:
        raise ConfigError(
            f"labels {label_spec} have a different structure from those that this trainer saw first, {bound}. Make "
            "another Trainer for them."
        )


def reads_strings(model: keras.Model) -> bool:
    """Whether a model has string inputs: by its graph or, without a graph, by its layers that look up strings."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    if not inputs:
        return not all(layer.supports_jit for layer in keras_internals.all_layers(model))
    return any(tensor.dtype == "string" for tensor in inputs)


def _shapes(spec: Any) -> Any:
    return tf.nest.map_structure(lambda part: f"{part.dtype.name}{list(part.shape)}", spec)


def with_examples(spec: Any, examples: int) -> Any:
    """The structure of `tf.TensorSpec` of one example, with dim 0 added for several examples."""
    return tf.nest.map_structure(lambda part: tf.TensorSpec([examples, *part.shape], part.dtype), spec)


def examples_of(structure: Any, integers_below: int = 2) -> list[tf.Tensor]:
    """Dummy values for each leaf, for trials of losses and metrics: floats in (0, 1), integers and booleans 0 and 1.

    Args:
      structure: `tf.TensorSpec` of each.
      integers_below: Bound of the integers.
    """
    generator = np.random.default_rng(0)
    values = []
    for leaf in keras.tree.flatten(structure):
        dtype = leaf.dtype
        drawn = generator.uniform(0.1, 0.9, leaf.shape) if dtype.is_floating else None
        if drawn is None:
            drawn = generator.integers(0, integers_below, leaf.shape)
        values.append(tf.cast(tf.constant(drawn), dtype))
    return values
