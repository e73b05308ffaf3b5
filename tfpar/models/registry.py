"""Model builders by name.

A builder is a function `(spec, *, keyword options) -> keras.Model`. `--model_args` may override
its keyword options, so its signature serves as the documentation and as the check. One builder may
have several names, each with its own preset:

    @register("resnet18", blocks=(2, 2, 2, 2))
    @register("resnet34", blocks=(3, 4, 6, 3))
    def resnet(spec: TaskSpec, *, blocks: Sequence[int], stem: str | None = None) -> keras.Model:
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tfpar.config import ConfigError, unknown_name
from tfpar.process.suggestions import did_you_mean

import keras

TASKS = ("classification", "language_model")

Builder = Callable[..., keras.Model]
Check = Callable[["TaskSpec", Mapping[str, Any]], None]
BuilderT = TypeVar("BuilderT", bound=Builder)


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """The requirements of a data set on a model.

    Attributes:
      task: "classification" (one label per example) or "language_model" (the next token at every position).
      input_shape: Shape of one example, without the batch: (height, width, channels) for images,
        (sequence_length,) for language models.
      input_dtype: Its dtype, e.g. "float32", "uint8", or "int32" for tokens.
      num_classes: Number of classes, or the vocabulary size of a language model.
    """

    task: str
    input_shape: tuple[int, ...]
    input_dtype: str
    num_classes: int

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise unknown_name("task", self.task, TASKS)
        # A shape from JSON is a list; equal specifications must compare equal.
        object.__setattr__(self, "input_shape", tuple(int(size) for size in self.input_shape))
        if any(size < 1 for size in self.input_shape):
            raise ConfigError(f"input_shape={self.input_shape}: every dimension of an example must be at least 1.")
        if self.num_classes < 1:
            raise ConfigError(f"num_classes={self.num_classes}: a model needs at least one class.")
        if self.task == "language_model":
            if len(self.input_shape) != 1:
                raise ConfigError(
                    f"input_shape={self.input_shape}: a language model reads one sequence of tokens per example, "
                    "so its shape is (sequence_length,)."
                )
            if not self.input_dtype.startswith(("int", "uint")):
                raise ConfigError(f"input_dtype={self.input_dtype!r}: tokens are integers, e.g. 'int32'.")


@dataclasses.dataclass(frozen=True)
class _Entry:
    builder: Builder
    preset: Mapping[str, Any]
    check: Check | None


_BUILDERS: dict[str, _Entry] = {}


def register(name: str, *, check: Check | None = None, **preset: Any) -> Callable[[BuilderT], BuilderT]:
    """Decorator that registers a builder as `name`.

    Args:
      name: The value of `--model` that selects the builder.
      check: Takes the data's specification and all options, and raises ConfigError if the builder does not support
        them. It runs before the strategy starts, so it must not create layers; the builder need not check again.
      **preset: Values of the builder's keyword options under this name; `--model_args` may still override them.

    Raises:
      ValueError: The name is taken, or the preset sets an option that the builder does not have.
    """

    def decorate(builder: BuilderT) -> BuilderT:
        if name in _BUILDERS:
            raise ValueError(f"The model name {name!r} is already taken by {_BUILDERS[name].builder.__qualname__}.")
        unknown = set(preset) - set(_options(builder))
        if unknown:
            raise ValueError(f"The preset of {name!r} sets {sorted(unknown)}, which {builder.__qualname__} lacks.")
        _BUILDERS[name] = _Entry(builder, dict(preset), check)
        return builder

    return decorate


def names() -> tuple[str, ...]:
    """Returns all registered model names, sorted."""
    return tuple(sorted(_BUILDERS))


def options(name: str) -> dict[str, Any]:
    """Returns the keyword options of a model with their values under this name.

    Args:
      name: A registered name.

    Returns:
      A map from option name to default value, in the order of the builder's signature.

    Raises:
      ConfigError: The name is not registered.
    """
    entry = _entry(name)
    return {key: entry.preset.get(key, default) for key, default in _options(entry.builder).items()}


def check_model(name: str, spec: TaskSpec, **overrides: Any) -> None:
    """Raises the errors of `build` that do not depend on creating a layer; does not use TensorFlow.

    Args:
      name: A registered name.
      spec: The requirements of the data.
      **overrides: Keyword options of the builder.

    Raises:
      ConfigError: The name or an option is unknown, a value is out of range, or the model is for another task.
    """
    entry = _entry(name)
    allowed = options(name)
    hints = _hints(entry.builder)
    for key, value in overrides.items():
        if key not in allowed:
            raise _unknown_option(name, key, allowed)
        if not _matches_hint(value, hints.get(key, Any)):
            raise ConfigError(f"--model_args {key}={value!r}: {key} of --model={name} is {_describe_hint(hints[key])}.")
    merged = {**allowed, **overrides}
    missing = [key for key, value in merged.items() if value is inspect.Parameter.empty]
    if missing:
        raise ConfigError(f"--model={name} needs --model_args to set {', '.join(missing)}.")
    if entry.check is not None:
        with _name_flags_in_errors(name, spec, overrides):
            entry.check(spec, merged)


def build(name: str, spec: TaskSpec, **overrides: Any) -> keras.Model:
    """Builds a model with initialised weights.

    The weights come from Keras' global generator: call `keras.utils.set_random_seed` first, and
    build inside `strategy.scope()` if there is a strategy.

    Args:
      name: A registered name, see `names()`.
      spec: The requirements of the data.
      **overrides: Keyword options of the builder, e.g. `activation="gelu"`.

    Returns:
      A built model that maps a batch [m, *spec.input_shape] to float32 logits: [m, num_classes] for
      classification, [m, sequence_length, num_classes] for language models.

    Raises:
      ConfigError: The name or an option is unknown, the builder refuses a value, or the model is for another task.
    """
    check_model(name, spec, **overrides)
    entry = _entry(name)
    with _name_flags_in_errors(name, spec, overrides):
        model = entry.builder(spec, **{**entry.preset, **overrides})
    model.name = name
    return model


@contextlib.contextmanager
def _name_flags_in_errors(name: str, spec: TaskSpec, overrides: Mapping[str, Any]) -> Iterator[None]:
    """Turns the errors of a builder, or of Keras, into errors that name the flags."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        arguments = ",".join(f"{key}={value}" for key, value in overrides.items()) or "(none)"
        raise ConfigError(
            f"--model={name} with --model_args={arguments} cannot be built for input shape {spec.input_shape} "
            f"and {spec.num_classes} classes: {error}"
        ) from error


def _entry(name: str) -> _Entry:
    if name not in _BUILDERS:
        raise unknown_name("--model", name, _BUILDERS)
    return _BUILDERS[name]


def _options(builder: Builder) -> dict[str, Any]:
    """Returns the keyword options of a builder with their defaults, or `inspect.Parameter.empty` without a default."""
    parameters = list(inspect.signature(builder).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


def _hints(builder: Builder) -> dict[str, Any]:
    """Returns the annotations of the options; none if an annotation uses a name that only type checkers can resolve."""
    try:
        return typing.get_type_hints(builder)
    except NameError:
        return {}


def _matches_hint(value: Any, hint: Any) -> bool:
    """Whether a value matches the annotation of an option, as far as numbers, booleans and sequences can tell.

    The builder itself checks words: where `none` is one of several words, it arrives as None.
    """
    if _is_union(hint):
        return any(_matches_hint(value, part) for part in typing.get_args(hint))
    if _is_list(hint):
        values = value if isinstance(value, (list, tuple)) else [value]  # one value stands for a list of one
        return all(_matches_hint(part, typing.get_args(hint)[0]) for part in values)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    if hint in (bool, types.NoneType):
        return isinstance(value, hint)
    return True


def _describe_hint(hint: Any) -> str:
    parts = typing.get_args(hint)
    if _is_union(hint):
        return " or ".join(_describe_hint(part) for part in parts)
    if _is_list(hint):
        return f"a list, each {_describe_hint(parts[0])}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", types.NoneType: "none"}
    return words.get(hint, str(hint))


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _is_list(hint: Any) -> bool:
    """Whether an annotation is a sequence of one type; the origin of `Literal` and the like is not a class."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    has_one_type = len(parts) == 1 or parts[1:] == (...,)
    return isinstance(origin, type) and issubclass(origin, Sequence) and has_one_type


def _unknown_option(name: str, key: str, allowed: Mapping[str, Any]) -> ConfigError:
    return ConfigError(
        f"--model_args: {key!r} is not an option of --model={name}.{did_you_mean(key, allowed)} Its options: "
        f"{', '.join(allowed)}."
    )
