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
from tfpar.parallel.split import assign_whole

import keras
import numpy as np
import tensorflow as tf

_RUNTIME_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
)

_log = logging.getLogger(__name__)

_GIVEN = "tfpar_given"


def given_for(variable: keras.Variable) -> keras.Variable | None:
    """The variable of the user's model that a variable of its copy stands for; None for any other variable."""
    return vars(variable).get(_GIVEN)


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
    _values: list[tf.Tensor] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.note()

    def note(self) -> None:
        """Records what is frozen now, and the values of the weights; they are the same in both models."""
        self._flags = _trainable_flags(self.model)
        self._note_values()
        for variable, counterpart in zip(self.model.weights, _counterparts(self.model, self.copy), strict=True):
            vars(counterpart)[_GIVEN] = variable

    def _note_values(self) -> None:
        # A tensor that was read shares the memory of its variable until another value is assigned.
        self._values = [tf.convert_to_tensor(variable.value) for variable in self.model.weights]

    def take_over(self) -> None:
        """Repeats on the copy what the user has since done to the original model: freezing, and assigning weights.

        Raises:
          ConfigError: The model has other weights than its copy.
        """
        flags = _trainable_flags(self.model)
        shapes = [[each.shape for each in every] for every in (self.model.weights, self._values)]
        if len(flags) != len(self._flags) or shapes[0] != shapes[1]:
            raise ConfigError(
                f"model {self.model.name!r} has other layers or weights than when the Trainer was made, which trains a "
                "copy of it. Create a new Trainer for it; for adapters, the option lora= adds them to both."
            )
        counterparts = _counterparts(self.model, self.copy)
        each: list[Any] = [*all_layers(self.copy), *counterparts]
        own = [bool(part.trainable) for part in each]
        for part, was, before, now in zip(each, own, self._flags, flags, strict=True):
            # Outer layers first: setting one also sets those inside it, and its weights, also those that stay frozen.
            if now is not before or bool(part.trainable) is not was:
                part.trainable = now
        self._flags = flags
        earlier, taken = self._values, False
        self._note_values()
        for counterpart, old, new in zip(counterparts, earlier, self._values, strict=True):
            if not is_same(old, new):
                assign_whole(counterpart, new.numpy())
                taken = True
        if taken:
            finalize_states(self.copy)

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
        self._note_values()


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
    return (copy := copied(model)), Original(model, copy)


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


def copied(model: keras.Model) -> keras.Model:
    """A copy of a built model, from its configuration and weights.

    Raises:
      ConfigError: The model cannot be copied.
    """
    try:
        copy = type(model).from_config(model.get_config())
        for variable, value in zip(_counterparts(model, copy), model.get_weights(), strict=True):
            variable.assign(value)
        _freeze_like(model, copy)
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
    return [bool(each.trainable) for each in (*all_layers(model), *model.weights)]


def _freeze_like(model: keras.Model, copy: keras.Model) -> None:
    """Freezes single weights of the copy; a configuration has only the flags of layers."""
    for variable, counterpart in zip(model.weights, _counterparts(model, copy), strict=True):
        if counterpart.trainable != variable.trainable:
            counterpart.trainable = variable.trainable


def is_same(old: tf.Tensor, new: tf.Tensor) -> bool:
    """Whether two tensors on one device have the same elements, also those that are not a number."""
    if "CPU" in new.device and old.shape == new.shape:
        one, other = np.asarray(old), np.asarray(new)  # views of the tensors
        return one.ctypes.data == other.ctypes.data or np.array_equal(_bytes(one), _bytes(other))
    return bool(tf.reduce_all((old == new) | ((old != old) & (new != new))))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
