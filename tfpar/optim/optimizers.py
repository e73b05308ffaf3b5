"""Optimizers by name: Keras' own class where there is one, `LARS` from here.

How an optimizer updates is elsewhere: `pure_update` on tensors, `server_update` on parameter servers,
`exchanged_update` in plain Keras scripts on a cluster.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tfpar.config import ConfigError, OptimizerConfig, unknown_name
from tfpar.optim import keras_internals, keras_rates
from tfpar.optim.lars import LARS

import keras

OPTIMIZERS: dict[str, type[keras.optimizers.Optimizer]] = {
    "adadelta": keras.optimizers.Adadelta,
    "adafactor": keras.optimizers.Adafactor,
    "adagrad": keras.optimizers.Adagrad,
    "adam": keras.optimizers.Adam,
    "adamax": keras.optimizers.Adamax,
    "adamw": keras.optimizers.AdamW,
    "ftrl": keras.optimizers.Ftrl,
    "lamb": keras.optimizers.Lamb,
    "lars": LARS,
    "lion": keras.optimizers.Lion,
    "muon": keras.optimizers.Muon,
    "nadam": keras.optimizers.Nadam,
    "rmsprop": keras.optimizers.RMSprop,
    "sgd": keras.optimizers.SGD,
}

# Layers that give a model's output, by the names in use for them. Muon orthogonalises hidden matrices only;
# Keras' class takes regular expressions that are searched for in a variable's path.
MUON_OUTPUT_LAYERS = r"(^|/)(output|outputs|logits|head|lm_head|classifier|predictions|unembed)(_\d+)?(/|$)"

# Constructor arguments that have their own flags.
_GOVERNED_BY_FLAG = {
    "learning_rate": "--learning_rate",
    "weight_decay": "--weight_decay",
    "adam_weight_decay": "--weight_decay",
    "exclude": "--weight_decay_exclude",
    "global_clipnorm": "--clip_norm",
    "use_ema": "--ema",
    "ema_momentum": "--ema",
    "gradient_accumulation_steps": "--accumulate_steps",
    "loss_scale_factor": "--precision",
}

# Keras' optimizers that update every element from its own gradient and state alone (3.15).
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)
# Those that need whole matrices, or norms or means over whole tensors.
WHOLE_TENSORS = (keras.optimizers.Adafactor, keras.optimizers.Lamb, LARS, keras.optimizers.Muon)
NEEDS_WHOLE = tuple(kind.__name__.lower() for kind in WHOLE_TENSORS)


def names() -> list[str]:
    """The names that `build` knows."""
    return sorted(OPTIMIZERS)


def check_arguments(config: OptimizerConfig) -> None:
    """Checks name and arguments without creating the optimizer, which would run a TensorFlow operation.

    Raises:
      ConfigError: An unknown name or argument, with suggestions; one that has its own flag; a value of a wrong kind.
    """
    if config.optimizer not in OPTIMIZERS:
        raise unknown_name("--optimizer", config.optimizer, OPTIMIZERS)
    _checked_arguments(config, OPTIMIZERS[config.optimizer])


def build(config: OptimizerConfig, *, global_batch_size: int) -> keras.optimizers.Optimizer:
    """The optimizer of a configuration.

    The learning rate is `learning_rate`, times `global_batch_size / base_batch_size` where a base batch size is set
    (linear scaling, Goyal et al. 2017). SGD and LARS get a momentum of 0.9.

    Weight decay is decoupled from the gradient, `w -= learning_rate * weight_decay * w` (Loshchilov and Hutter 2019),
    but for LARS, whose trust ratio contains it. Variables with a part of `weight_decay_exclude` in their path are not
    decayed; LARS does not rescale them either. The exclusion belongs to the returned object and takes effect when it is
    built, by whomever.

    Muon updates two-dimensional hidden weights; Adam updates embeddings, output layers (`MUON_OUTPUT_LAYERS`), those in
    `exclude_layers` and weights of other ranks, at the same learning rate.

    Args:
      config: Name, arguments and rates.
      global_batch_size: Examples per step over all replicas and micro-batches.

    Returns:
      A Keras optimizer, not yet built, whose learning rate is a variable.

    Raises:
      ConfigError: An unknown name or argument, with suggestions; an argument that has a flag of its own;
        a value that the optimizer refuses.
    """
    check_arguments(config)
    kind = OPTIMIZERS[config.optimizer]
    excluded = tuple(part.strip().lower() for part in config.weight_decay_exclude.split(",") if part.strip())
    arguments: dict[str, Any] = {"learning_rate": scaled_learning_rate(config, global_batch_size)}
    # AdamW refuses None; for the others it saves the decay's operations.
    arguments["weight_decay"] = config.weight_decay if config.weight_decay or config.optimizer == "adamw" else None
    if config.ema:
        arguments |= {"use_ema": True, "ema_momentum": config.ema}
    if config.optimizer in ("sgd", "lars"):
        arguments["momentum"] = 0.9
    if config.optimizer == "lars":
        arguments["exclude"] = list(excluded)
    if config.optimizer == "muon":
        arguments |= {"adam_weight_decay": arguments["weight_decay"], "exclude_layers": [MUON_OUTPUT_LAYERS]}
    arguments |= _checked_arguments(config, kind)
    try:
        optimizer = kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--optimizer_args={config.optimizer_args!r}: {config.optimizer} refuses it: {error}"
        ) from error
    if excluded:
        _exclude_by_path(optimizer, excluded)
    return optimizer


def scaled_learning_rate(config: OptimizerConfig, global_batch_size: int) -> float:
    """The peak learning rate at a global batch size (Goyal et al. 2017, section 2.1)."""
    factor = global_batch_size / config.base_batch_size if config.base_batch_size else 1.0
    return float(config.learning_rate * factor)


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses optimizers that do themselves what the training step does for all replicas together.

    Raises:
      ConfigError: Not a Keras optimizer; or a `LossScaleOptimizer`, a `MultiOptimizer`, or one with a loss scale or
        gradient accumulation of its own. The message says what to use instead.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(f"optimizer={optimizer!r} is not a Keras 3 optimizer. Pass e.g. keras.optimizers.AdamW().")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            "optimizer=LossScaleOptimizer checks for overflow on replica 0 alone (Keras 3.15). Pass the optimizer "
            "inside it and --precision=mixed_float16 (precision='mixed_float16'): the step scales the loss itself."
        )
    if optimizer.loss_scale_factor is not None:
        raise ConfigError(
            f"loss_scale_factor={optimizer.loss_scale_factor} of the optimizer would divide gradients that were never "
            "multiplied by it. Leave it out; --precision=mixed_float16 scales the loss in the step."
        )
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ConfigError(
            "optimizer=MultiOptimizer hides its learning rates and updates each group of variables separately. Pass a "
            "single optimizer; Muon already includes Adam (--optimizer=muon)."
        )
    if optimizer.gradient_accumulation_steps:
        raise ConfigError(
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps} of the optimizer cannot run under a "
            f"strategy (Keras 3.15). Leave it out and use --accumulate_steps={optimizer.gradient_accumulation_steps} "
            "(accumulate_steps=...): micro-batches add up in the step, with one exchange per step. (Trainer does this "
            "itself for a new optimizer without a learning-rate schedule, whose steps Keras counts in micro-batches.)"
        )


def recreate(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """A new copy of the optimizer, without variables, for the strategy in whose scope this is called.

    Args:
      optimizer: The original. Copies class, configuration, and exclusions from weight decay, which Keras' configuration
        omits. A schedule or function of the learning rate is shared.

    Raises:
      ConfigError: Variables were excluded from weight decay as objects; the copy will have different variables. Or the
        class cannot be made from its configuration.
    """
    parts = getattr(optimizer, "_tfpar_excluded_parts", None)
    if parts is None and keras_internals.excludes_variables(optimizer):
        raise ConfigError(
            f"{optimizer.name}.exclude_from_weight_decay(var_list=...) names variables made outside the strategy. "
            "Exclude by name (var_names=[...]), or make model and optimizer in the strategy's scope."
        )
    copy = _from_own_config(optimizer)
    if given := vars(optimizer).get(_GIVEN):
        keras_internals.set_untracked(copy, **{_GIVEN: given})
    if pattern := keras_internals.excluded_names(optimizer):
        copy.exclude_from_weight_decay(var_names=[pattern])
    if parts is not None:
        _exclude_by_path(copy, parts)
    return copy


@dataclasses.dataclass(frozen=True, eq=False)
class _Given:
    """The user's optimizer, and the learning rate that was taken from it; None for a schedule."""

    optimizer: keras.optimizers.Optimizer
    rate: float | None


_GIVEN = "tfpar_given"


def follow_rate(copy: keras.optimizers.Optimizer, given: keras.optimizers.Optimizer) -> None:
    """Makes `take_over_rate` give a copy, and copies of it, what is assigned to the learning rate of the original."""
    known = vars(given).get(_GIVEN) or _Given(given, keras_rates.assigned_rate(given))
    keras_internals.set_untracked(copy, **{_GIVEN: known})


def take_over_rate(copies: Sequence[keras.optimizers.Optimizer]) -> None:
    """Gives copies the learning rate that has been assigned to their original since.

    If none has, they keep their own, which a callback may have changed.
    """
    for copy in copies:
        given = vars(copy).get(_GIVEN)
        rate = keras_rates.assigned_rate(given.optimizer) if given else None
        if rate is not None and rate != given.rate and keras_rates.assigned_rate(copy) is not None:
            copy.learning_rate = rate
            keras_internals.set_untracked(copy, **{_GIVEN: _Given(given.optimizer, rate)})


def _from_own_config(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    config = keras_rates.config_of(optimizer)
    try:
        return type(optimizer).from_config(config)
    except Exception as error:  # of the user's class
        kind = type(optimizer).__name__
        raise ConfigError(
            f"optimizer={kind}(...): training needs a copy, and {kind}.from_config(optimizer.get_config()) raised "
            f"{type(error).__name__}: {error}. Define get_config() in {kind} so that it returns every argument of the "
            "constructor."
        ) from error


def recreate_for(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    build: Callable[..., Any] | None = None,
) -> keras.optimizers.Optimizer:
    """A copy of the optimizer built for other variables, with the state of those variables that both have.

    Args:
      optimizer: A built optimizer; it is not changed.
      variables: The variables that the new one updates.
      build: Builds the copy for them; by default its own `build`.
    """
    copy = recreate(optimizer)
    if build:
        build(copy, variables)
    else:
        copy.build(variables)
    slots = {key: variable for variable, key in _slots_of(optimizer)}
    new_keys = {id(variable): key for variable, key in _slots_of(copy)}
    # Keras 3.15 names a variable of an optimizer by the path of the weight that it belongs to; paths may repeat.
    paths = [variable.path for variable in optimizer.variables]
    others = {variable.path: variable for variable in optimizer.variables if paths.count(variable.path) == 1}
    taken = set()
    for variable in copy.variables:
        key = new_keys.get(id(variable))
        old = others.get(variable.path) if key is None else slots.get(key)
        if old is not None and old.shape == variable.shape:
            variable.assign(old.value)
            taken.add(id(variable))
    for weight, average in zip(variables, ema_variables(copy) or [], strict=False):
        if average is not None and id(average) not in taken:  # not a first step, which would start the average
            average.assign(weight.value)
    return copy


def _slots_of(optimizer: keras.optimizers.Optimizer) -> Iterator[tuple[keras.Variable, tuple[str, int]]]:
    """The variables of a built optimizer that it has in lists with one for each weight, with the names of these lists
    and the identities of the weights."""
    weights = keras_internals.trainable_variables(optimizer)
    own = [*map(id, optimizer.variables)]
    for name, value in vars(optimizer).items():
        if isinstance(value, list) and len(value) == len(weights) and [*map(id, value)] != own:
            yield from (
                (slot, (name, id(weight))) for slot, weight in zip(value, weights, strict=True) if id(slot) in own
            )


def ema_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable | None] | None:
    """The variables that hold the moving average of each trainable variable, in order; None without EMA."""
    if not (optimizer.use_ema and optimizer.built):
        return None
    return keras_internals.moving_averages(optimizer)


def _checked_arguments(config: OptimizerConfig, kind: type[keras.optimizers.Optimizer]) -> dict[str, Any]:
    """`optimizer_args` after a comparison with the constructor's signature; whole numbers become floats where due."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    arguments = config.arguments()
    for name, value in arguments.items():
        if name in _GOVERNED_BY_FLAG:
            raise ConfigError(
                f"--optimizer_args={config.optimizer_args!r}: {name} is governed by {_GOVERNED_BY_FLAG[name]}. "
                "Leave it out here."
            )
        if name not in parameters:
            raise unknown_name("--optimizer_args", name, parameters.keys() - _GOVERNED_BY_FLAG.keys())
        default = parameters[name].default
        _check_kind(config, name, value, default)
        if isinstance(default, float) and isinstance(value, int):  # as in 'momentum=0', which Keras refuses
            arguments[name] = float(value)
        if name == "exclude_layers":  # Keras would take each letter of a word for a pattern
            arguments[name] = [*(value if isinstance(value, list) else [value]), MUON_OUTPUT_LAYERS]
    return arguments


def _check_kind(config: OptimizerConfig, name: str, value: Any, default: Any) -> None:
    """Refuses a value that Keras would take and fail on in the first step."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, (int, float)):
        fits, wanted = is_number, "a number"
    elif isinstance(default, str):
        fits, wanted = isinstance(value, str), "a word"
    elif name == "exclude_layers":
        fits, wanted = _are_patterns(value), "a regular expression for paths of weights, or a list of them"
    elif name in ("clipnorm", "clipvalue", "ema_overwrite_frequency"):
        fits, wanted = is_number or value is None, "a number"
    else:
        return
    if not fits:
        raise ConfigError(
            f"--optimizer_args={config.optimizer_args!r}: {name} of {config.optimizer} is {wanted}, not {value!r}."
        )


def _are_patterns(value: Any) -> bool:
    try:
        return all(re.compile(each).pattern for each in (value if isinstance(value, list) else [value]))
    except (TypeError, re.error):
        return False


def _exclude_by_path(optimizer: keras.optimizers.Optimizer, parts: tuple[str, ...]) -> None:
    """Makes the optimizer exclude variables from weight decay by parts of their path, whoever builds it.

    Keras 3.15 compares names of variables ('gamma', 'kernel'), in which a layer such as 'layer_normalization' does
    not occur. The variables are known only when the optimizer is built; a subclass would have to be imported wherever
    the saved model is loaded. So the choice is hooked into this one object's `build`.
    """
    build_of_class = optimizer.build

    @functools.wraps(build_of_class)
    def build_excluding(variables: Sequence[keras.Variable], every: Sequence[keras.Variable] = ()) -> None:
        if not optimizer.built:
            every = every or variables
            if optimizer.weight_decay and all(path_contains(variable, parts) for variable in every):
                raise ConfigError(
                    f"--weight_decay_exclude={','.join(parts)} excludes every variable, so --weight_decay="
                    f"{optimizer.weight_decay} would do nothing. Paths look like {every[0].path!r}."
                )
            chosen = [variable for variable in variables if path_contains(variable, parts)]
            optimizer.exclude_from_weight_decay(var_list=chosen)
        build_of_class(variables)

    keras_internals.set_untracked(optimizer, build=build_excluding, _tfpar_excluded_parts=parts)


def build_for_some(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], every: Sequence[keras.Variable]
) -> None:
    """Builds an optimizer for some weights of a model; weight decay may exclude all of these.

    Args:
      optimizer: Not yet built.
      variables: The variables that it updates.
      every: All weights of the model.
    """
    excludes = getattr(optimizer, "_tfpar_excluded_parts", None)
    optimizer.build(variables, **({"every": every} if excludes else {}))


def path_contains(variable: keras.Variable, parts: Iterable[str]) -> bool:
    """Whether any of the parts (lower case) occurs in the variable's path, e.g. 'norm' in 'block/layer_norm/gamma'."""
    path = variable.path.lower()
    return any(part in path for part in parts)
