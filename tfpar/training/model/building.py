"""The model under the running strategy: the user's own object if possible, otherwise a synchronised copy."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim.keras_calls import copy_vocabulary, finalize_states
from tfpar.optim.keras_internals import all_layers

import keras
import tensorflow as tf

_RUNTIME_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Original:
    """The user's model, if the strategy needs its own variables and so trains a copy.

    Attributes:
      model: The model that the user passed.
      copy: The model under the strategy.
    """

    model: keras.Model
    copy: keras.Model
    _flags: list[bool] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.note_flags()

    def note_flags(self) -> None:
        """Records which layers are frozen now; they are the same in both models."""
        self._flags = _trainable_flags(self.model)

    def take_over_flags(self) -> None:
        """Repeats on the copy the freezing and unfreezing that the user has since done on the original model."""
        flags = _trainable_flags(self.model)
        layers = zip(all_layers(self.copy), self._flags, flags, strict=True)
        for layer, before, now in layers:  # outer layers first: setting one also sets those inside it
            if now is not before:
                layer.trainable = now
        self._flags = flags

    @contextlib.contextmanager
    def written_back(self, read: Callable[[Sequence[keras.Variable]], Sequence[tf.Tensor]]) -> Iterator[None]:
        """Copies the weights back to the user's model at the end of the context, however it ends.

        After an error of TensorFlow's runtime, such as the loss of a worker, nothing is copied, because the runtime may
        hang.

        Args:
          read: Returns the values of variables of the copy.
        """
        try:
            yield
        except _RUNTIME_ERRORS:
            raise
        except BaseException:
            self._write_back(read)
            raise
        self._write_back(read)

    def _write_back(self, read: Callable[[Sequence[keras.Variable]], Sequence[tf.Tensor]]) -> None:
        for variable, value in zip(self.model.weights, read(_counterparts(self.model, self.copy)), strict=True):
            variable.assign(value)
        finalize_states(self.model)


def build_model(
    model: keras.Model | Callable[[], keras.Model], strategy: tf.distribute.Strategy, *, announced: bool = True
) -> tuple[keras.Model, Original | None]:
    """The model to train. Call it in `scope_of` this model.

    Args:
      model: A built Keras model, or a function that returns one.
      strategy: The running strategy.
      announced: Whether to log which object is trained.

    Returns:
      The model under the strategy, and the original to synchronise with it; None if it is the user's own object, or if
      a function has built it.

    Raises:
      ConfigError: Not a model, a model that is not built, or a model that must be copied for the strategy and cannot be
        copied.
    """
    if not isinstance(model, keras.Model):
        return _called(model), None
    if not model.built:
        raise ConfigError("the model has no weights yet: call it on data or give it an Input, or pass a function.")
    if not model.variables or strategy.extended.variable_created_in_scope(model.variables[0].value):
        return model, None
    if is_usable_as_it_is(model, strategy):
        if announced:
            _log.info("model %s: the model itself is trained", model.name)
        return model, None
    if announced:
        _log.info("model %s: a copy is trained; fit writes its weights back into the given model", model.name)
    return (copy := _copied(model)), Original(model, copy)


def scope_of(
    model: keras.Model | Callable[[], keras.Model], strategy: tf.distribute.Strategy
) -> contextlib.AbstractContextManager[Any]:
    """The scope in which a model's optimizer and metrics are created.

    It is the strategy's scope, unless the user's own model, built outside it, is trained: TensorFlow 2.21 then refuses
    optimizer variables in the scope (`colocate_vars_with`). With one device this makes no other difference.
    """
    outside = isinstance(model, keras.Model) and model.variables and is_usable_as_it_is(model, strategy)
    return contextlib.nullcontext() if outside else strategy.scope()


def is_usable_as_it_is(model: keras.Model, strategy: tf.distribute.Strategy) -> bool:
    """Whether a model was built outside a strategy and has its variables on the device of the strategy's only
    replica."""
    if not isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return False
    if model.variables and strategy.extended.variable_created_in_scope(model.variables[0].value):
        return False
    device = _device(strategy.extended.worker_devices[0])
    values = [variable.value for variable in model.variables]
    return all(not isinstance(value, tf.distribute.DistributedValues) for value in values) and (
        {_device(value.device) for value in values} == {device}
    )


def _device(name: str) -> tuple[str | None, int | None]:
    spec = tf.DeviceSpec.from_string(name)
    return spec.device_type, spec.device_index


def _called(function: Callable[[], keras.Model]) -> keras.Model:
    if isinstance(function, keras.layers.Layer):
        raise ConfigError(
            f"model={function!r} is a layer, not a model: put it into one, keras.Sequential([keras.Input(...), layer])."
        )
    if not callable(function):
        raise ConfigError(f"model={function!r} is neither a Keras model nor a function that returns one.")
    with _same_weights_on_workers():
        built = function()
    if not isinstance(built, keras.Model) or not built.built:
        raise ConfigError(
            f"model() returned {built!r}; it must return a built Keras model. Give it an Input, or call it on a "
            "batch (of zeros) before it is returned."
        )
    return built


@contextlib.contextmanager
def _same_weights_on_workers() -> Iterator[None]:
    """Says what the error of TensorFlow 2.21 means that ends the creation of a variable of other shape elsewhere."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(
            r"expected shape (\[.*?\]) but another member in the group expected shape (\[.*?\])", str(error)
        )
        if found is None:
            raise
        raise ConfigError(
            f"model() makes a weight of shape {found[1]} on one worker and {found[2]} on another. Each worker must "
            "build the same model."
        ) from error


def _copied(model: keras.Model) -> keras.Model:
    try:
        copy = type(model).from_config(model.get_config())
        for variable, value in zip(_counterparts(model, copy), model.get_weights(), strict=True):
            variable.assign(value)
        finalize_states(copy)
        for layer, other in zip(all_layers(model), all_layers(copy), strict=True):
            copy_vocabulary(layer, other)
    except (NotImplementedError, TypeError, ValueError) as error:
        # Keras' message has the whole configuration first, and the reason in its last line.
        reason = str(error).strip().rpartition("\n")[2].removeprefix("Exception encountered: ")
        raise ConfigError(
            f"the model was built outside the strategy and cannot be rebuilt under it ({reason}). Pass a "
            "function that builds it: Trainer(lambda: build_model(), ...)."
        ) from error
    return copy


def _counterparts(model: keras.Model, copy: keras.Model) -> list[keras.Variable]:
    """The weights of the copy in the order of those of the model.

    The orders differ in a layer that was quantised after it was built: then its scales come last, and in the copy,
    which is built from the configuration, they come first (Keras 3.15).
    """
    found: dict[int, keras.Variable] = {}
    for layer, other in zip(all_layers(model), all_layers(copy), strict=True):
        if len(all_layers(layer)) == 1 and _names(layer) != _names(other):
            by_name = dict(zip(_names(other), other.weights, strict=True))
            if len(by_name) == len(layer.weights) and by_name.keys() == {*_names(layer)}:
                found |= {id(variable): by_name[variable.name] for variable in layer.weights}
    taken = set(map(id, found.values()))
    rest = iter([variable for variable in copy.weights if id(variable) not in taken])
    return [found[id(variable)] if id(variable) in found else next(rest) for variable in model.weights]


def _names(layer: keras.layers.Layer) -> list[str]:
    return [variable.name for variable in layer.weights]


def _trainable_flags(model: keras.Model) -> list[bool]:
    return [bool(layer.trainable) for layer in all_layers(model)]
