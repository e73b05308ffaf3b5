"""Selects the trained part of a model: weights by their paths, and low-rank adapters beside frozen weights.

Frozen weights are not exchanged, have no optimizer state, and share one file in all checkpoints of a run.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Sequence

from tfpar.config import ALL_WEIGHTS, ConfigError, TrainConfig
from tfpar.optim.keras_internals import all_layers, weights_made_to_learn
from tfpar.process.listing import listed
from tfpar.training.model.building import Original

import keras

_log = logging.getLogger(__name__)

# By default, adapters are at queries and values of attention, as in the paper, under the names that Keras,
# keras-hub and tfpar give them.
_ATTENTION = r"(^|[/_])(query|value|qkv)(_dense|_proj)?$"
_ROLES = {"query": "value", "value": "query"}
_SHOWN = 4


def adapt_model(
    model: keras.Model, options: TrainConfig, original: Original | None = None, *, announced: bool = False
) -> None:
    """Adds adapters to a model and freezes the weights that are not trained, see `--lora` and `--trainable`.

    A layer that has nothing left to train is frozen as a whole, so that batch normalisation uses its statistics and
    keeps them. Without these options, the model does not change.

    Args:
      model: A built model. Under a strategy, call it in its scope.
      options: `trainable`, `lora` and `seed` are used.
      original: The user's model, if `model` is a copy of it; gets the same changes.
      announced: Whether to log what is trained.

    Raises:
      ConfigError: An expression without a match, or a layer that cannot have adapters; names the candidates.
    """
    trainable = options.trainable
    if not trainable and not options.lora:
        return
    adapted = _add_adapters(model, options) if options.lora else []
    pattern, found = "" if trainable == ALL_WEIGHTS else trainable, False
    for layer in all_layers(model, include_self=False):
        own = weights_made_to_learn(layer)
        named = [weight for weight in own if trainable and re.search(pattern, weight.path)]
        found = found or bool(named)
        trained = {id(weight) for weight in [*named, *filter(is_adapter, own)]}
        if own and len(all_layers(layer)) == 1:  # not a layer that contains layers, which would be frozen too
            layer.trainable = bool(trained)
        for weight in own:
            weight.trainable = id(weight) in trained
    if trainable and not found:
        learned = {id(weight) for layer in all_layers(model) for weight in weights_made_to_learn(layer)}
        paths = listed([weight.path for weight in model.weights if id(weight) in learned], _SHOWN)
        end = "" if paths.endswith("...") else "."
        raise ConfigError(f"--trainable={trainable!r} matches no weight that can learn. Paths are such as {paths}{end}")
    if announced and (idle := _idle_alternatives(pattern, model)):
        _log.warning("--trainable=%s: no weight that can learn matches %s.", trainable, " or ".join(map(repr, idle)))
    if original is not None:
        adapt_model(original.model, options)
        original.note()
    if announced:
        _log.info("%s", _description(model, options, adapted))


def _idle_alternatives(pattern: str, model: keras.Model) -> list[str]:
    """The alternatives of an expression that match no weight; empty if it has groups or classes, which may hold `|`."""
    alternatives = [] if re.search(r"[(\[]|\\\|", pattern) else pattern.split("|")
    paths = [weight.path for layer in all_layers(model) for weight in weights_made_to_learn(layer)]
    return [each for each in alternatives if not any(re.search(each, path) for path in paths)]


def is_adapter(weight: keras.Variable) -> bool:
    """Whether a weight is one of the two factors that `enable_lora` of Keras adds."""
    return weight.name.startswith("lora_")


def frozen_weights(model: keras.Model) -> list[keras.Variable]:
    """The weights that would be trained if they and their layers were not frozen: the model lists them as
    non-trainable, but they are not state."""
    trained = {id(weight) for weight in model.trainable_variables}
    return [
        weight for layer in all_layers(model) for weight in weights_made_to_learn(layer) if id(weight) not in trained
    ]


def all_weights(model: keras.Model) -> list[keras.Variable]:
    """The weights of a model, frozen ones included, without its state."""
    return [*model.trainable_variables, *frozen_weights(model)]


def merge_adapters(model: keras.Model) -> int:
    """Removes the adapters from the layers of a loaded model; returns the number of layers.

    Keras adds the product of the adapters to the kernel that it saves, and loads adapters of zero: removing them
    changes nothing.
    """
    layers = [layer for layer in all_layers(model) if getattr(layer, "lora_enabled", False)]
    for layer in layers:
        layer.lora_enabled = False
        layer.lora_rank = None
    return len(layers)


def _add_adapters(model: keras.Model, options: TrainConfig) -> list[keras.layers.Layer]:
    """Enables LoRA (Hu et al. 2022, LoRA: Low-Rank Adaptation of Large Language Models) in layers, and returns them."""
    rank, pattern = options.adapters()
    inside = all_layers(model, include_self=False)
    able = sorted((layer for layer in inside if _can_have_adapters(layer)), key=lambda layer: layer.path)
    paths = {layer.path for layer in inside}
    layers = [
        layer for layer in able if (re.search(pattern, layer.path) if pattern else _is_in_attention(layer.path, paths))
    ]
    if not layers and not pattern:
        layers = [layer for layer in able if isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense)]
    if not layers:
        raise ConfigError(
            f"--lora={options.lora}: no layer that can have adapters has a path that matches "
            f"{pattern or _ATTENTION!r}. Layers that can: {listed([layer.path for layer in able], _SHOWN) or 'none'}."
        )
    layers = _without_trained(layers, options)
    _check_rank(layers, rank, options)
    for place, layer in enumerate(layers):
        if not layer.lora_enabled:
            # The other factor is zero, so that the model starts unchanged.
            first = keras.initializers.HeUniform(seed=options.seed + place)
            try:
                layer.enable_lora(rank, a_initializer=first)
            except (ValueError, NotImplementedError) as error:
                raise ConfigError(f"--lora={options.lora}: {layer.path} cannot have adapters: {error}") from error
        elif layer.lora_rank != rank:  # a model that was adapted before
            raise ConfigError(
                f"--lora={options.lora}: {layer.path} has adapters of rank {layer.lora_rank} already. Give that rank."
            )
    return layers


def _is_in_attention(path: str, paths: Collection[str]) -> bool:
    """Whether a path is that of a query or value of attention, by its name and by that of the other beside it.

    A query and a value have the same path but for that word. One without the other is something else, such as the
    output of a critic that is named `value`.
    """
    found = re.search(_ATTENTION, path)
    if not found:
        return False
    role = found[2]
    return role not in _ROLES or path[: found.start(2)] + _ROLES[role] + path[found.end(2) :] in paths


def _kernel(layer: keras.layers.Layer) -> keras.Variable:
    """The weight beside which a layer has its adapters."""
    return max((w for w in layer.weights if not is_adapter(w)), key=lambda w: math.prod(w.shape))


def _without_trained(layers: list[keras.layers.Layer], options: TrainConfig) -> list[keras.layers.Layer]:
    """The layers whose kernels are frozen: beside a kernel that is trained itself, adapters add nothing."""
    if not options.trainable:
        return layers
    pattern = "" if options.trainable == ALL_WEIGHTS else options.trainable
    frozen = [layer for layer in layers if not re.search(pattern, _kernel(layer).path)]
    if not frozen:
        raise ConfigError(
            f"--lora={options.lora}: --trainable={options.trainable} trains the kernels of all layers that would have "
            f"adapters ({listed([layer.path for layer in layers], _SHOWN)}). Leave one of the two out, or choose other "
            "layers."
        )
    return frozen


def _check_rank(layers: Sequence[keras.layers.Layer], rank: int, options: TrainConfig) -> None:
    """Refuses a rank at which no adapter has fewer weights than the kernel that it stands for."""
    shapes = [_kernel(layer).shape for layer in layers]
    largest = max((math.prod(shape) - 1) // (math.prod(shape[:-1]) + shape[-1]) for shape in shapes)
    if rank > largest:
        where = listed([layer.path for layer in layers], _SHOWN)
        remedy = f"Give a rank of at most {largest}, or" if largest else "Leave --lora out, and"
        raise ConfigError(
            f"--lora={options.lora}: adapters of rank {rank} have as many weights as the kernels in {where}, or more. "
            f"{remedy} train the kernels themselves with --trainable."
        )


def _can_have_adapters(layer: keras.layers.Layer) -> bool:
    """Whether it is a single layer, without sublayers, that has `enable_lora`."""
    return callable(getattr(layer, "enable_lora", None)) and layer.built and len(all_layers(layer)) == 1


def _description(model: keras.Model, options: TrainConfig, adapted: Sequence[keras.layers.Layer]) -> str:
    count = sum(math.prod(weight.shape) for weight in model.trainable_variables)
    total, causes = model.count_params(), []
    if adapted:
        where = listed([layer.path for layer in adapted], _SHOWN)
        causes.append(f"adapters of rank {options.adapters()[0]} in {len(adapted)} layers ({where})")
    if options.trainable:
        causes.append(f"--trainable={options.trainable}")
    percent = 100.0 * count / total
    share = f"{percent:.2g}" if percent < 10.0 else f"{percent:.0f}"  # %g would write 1e+02
    return f"training {count:,} of {total:,} parameters ({share} %): {' and '.join(causes)}"
