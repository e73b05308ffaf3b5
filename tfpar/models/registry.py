"""Model builders by name.

A builder is a function `(spec, *, keyword options) -> keras.Model`. Its keyword options are what
`--model_args` may override, so its signature is the documentation and the check at once. One
builder may serve several names, each with its own preset:

    @register("resnet18", blocks=(2, 2, 2, 2))
    @register("resnet34", blocks=(3, 4, 6, 3))
    def resnet(spec: TaskSpec, *, blocks: Sequence[int], stem: str | None = None) -> keras.Model:
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tfpar.config import ConfigError, unknown_name

import keras

TASKS = ("classification", "language_model")

Builder = Callable[..., keras.Model]
Check = Callable[["TaskSpec", Mapping[str, Any]], None]
BuilderT = TypeVar("BuilderT", bound=Builder)


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """What a data set asks of a model.

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
        # A shape read from JSON arrives as a list; equal specifications must compare equal.
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
    """Decorator that makes a builder known as `name`.

    Args:
      name: What `--model` selects.
      check: Given the data's specification and all options, raises ConfigError for what the builder cannot make. It
        runs before the strategy starts, so it must not create layers; the builder need not check again.
      **preset: Values of the builder's keyword options under this name; `--model_args` may still override them.

    Raises:
      ValueError: The name is taken, or the preset holds something the builder has no option for.
    """

    def decorate(builder: BuilderT) -> BuilderT:
        if name in _BUILDERS:
            raise ValueError(f"The model name {name!r} is already taken by {_BUILDERS[name].builder.__qualname__}.")
        surplus = set(preset) - set(_options(builder))
        if surplus:
            raise ValueError(f"The preset of {name!r} sets {sorted(surplus)}, which {builder.__qualname__} lacks.")
        _BUILDERS[name] = _Entry(builder, dict(preset), check)
        return builder

    return decorate


def names() -> tuple[str, ...]:
    """All registered model names, sorted."""
    return tuple(sorted(_BUILDERS))


def options(name: str) -> dict[str, Any]:
    """The keyword options of a model with their values under this name.

    Args:
      name: A registered name.

    Returns:
      Option name to default value, in the order of the builder's signature.

    Raises:
      ConfigError: The name is not registered.
    """
    entry = _entry(name)
    return {key: entry.preset.get(key, default) for key, default in _options(entry.builder).items()}


def check_model(name: str, spec: TaskSpec, **overrides: Any) -> None:
    """Refuses what `build` would refuse, as far as that can be told without making a layer: TensorFlow is not touched.

    Args:
      name: A registered name.
      spec: What the data asks for.
      **overrides: Keyword options of the builder.

    Raises:
      ConfigError: An unknown name or option, a value out of its range, or a task the model is not for.
    """
    entry = _entry(name)
    allowed = options(name)
    hints = _hints(entry.builder)
    for key, value in overrides.items():
        if key not in allowed:
            raise _unknown_option(name, key, allowed)
        if not _fits(value, hints.get(key, Any)):
            raise ConfigError(f"--model_args {key}={value!r}: {key} of --model={name} is {_in_words(hints[key])}.")
    merged = {**allowed, **overrides}
    missing = [key for key, value in merged.items() if value is inspect.Parameter.empty]
    if missing:
        raise ConfigError(f"--model={name} needs --model_args to set {', '.join(missing)}.")
    if entry.check is not None:
        with _errors_named(name, spec, overrides):
            entry.check(spec, merged)


def build(name: str, spec: TaskSpec, **overrides: Any) -> keras.Model:
    """Builds a model with its weights initialised.

    Weights are drawn from Keras' global generator: call `keras.utils.set_random_seed` before, and
    build inside `strategy.scope()` where there is a strategy.

    Args:
      name: A registered name, see `names()`.
      spec: What the data asks for.
      **overrides: Keyword options of the builder, e.g. `activation="gelu"`.

    Returns:
      A built model from a batch [m, *spec.input_shape] to float32 logits: [m, num_classes] for
      classification, [m, sequence_length, num_classes] for language models.

    Raises:
      ConfigError: An unknown name or option, a value that the builder refuses, or a task it is not for.
    """
    check_model(name, spec, **overrides)
    entry = _entry(name)
    with _errors_named(name, spec, overrides):
        model = entry.builder(spec, **{**entry.preset, **overrides})
    model.name = name
    return model


@contextlib.contextmanager
def _errors_named(name: str, spec: TaskSpec, overrides: Mapping[str, Any]) -> Iterator[None]:
    """Turns the errors of a builder, or of Keras below it, into ones that name the flags."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        given = ",".join(f"{key}={value}" for key, value in overrides.items()) or "(none)"
        raise ConfigError(
            f"--model={name} with --model_args={given} cannot be built for input shape {spec.input_shape} "
            f"and {spec.num_classes} classes: {error}"
        ) from error


def _entry(name: str) -> _Entry:
    if name not in _BUILDERS:
        raise unknown_name("--model", name, _BUILDERS)
    return _BUILDERS[name]


def _options(builder: Builder) -> dict[str, Any]:
    """Keyword options of a builder with their defaults; `inspect.Parameter.empty` where there is none."""
    parameters = list(inspect.signature(builder).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


def _hints(builder: Builder) -> dict[str, Any]:
    """What the options are annotated as; nothing where a name is known to type checkers alone."""
    try:
        return typing.get_type_hints(builder)
    except NameError:
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an option is annotated as, as far as that is told by numbers, truth and sequences.

    What names may stand for is the builder's own check: `none` arrives as None where it is one of several words.
    """
    if _is_union(hint):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if _is_list(hint):
        each = value if isinstance(value, (list, tuple)) else [value]  # one stands for a list of one
        return all(_fits(part, typing.get_args(hint)[0]) for part in each)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    if hint in (bool, types.NoneType):
        return isinstance(value, hint)
    return True


def _in_words(hint: Any) -> str:
    parts = typing.get_args(hint)
    if _is_union(hint):
        return " or ".join(_in_words(part) for part in parts)
    if _is_list(hint):
        return f"a list, each {_in_words(parts[0])}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", types.NoneType: "none"}
    return words.get(hint, str(hint))


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _is_list(hint: Any) -> bool:
    """Whether it stands for any number of one kind; `Literal` and the like have origins that are no classes."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    of_one_kind = len(parts) == 1 or parts[1:] == (...,)
    return isinstance(origin, type) and issubclass(origin, Sequence) and of_one_kind


def _unknown_option(name: str, key: str, allowed: Mapping[str, Any]) -> ConfigError:
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(
        f"--model_args: {key!r} is not an option of --model={name}.{hint} Its options: {', '.join(allowed)}."
    )
