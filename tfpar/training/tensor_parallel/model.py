"""A model whose weights are divided over the devices of the model axis."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping

from tfpar import models
from tfpar.config import ConfigError
from tfpar.exchange import DevicesOfReplica
from tfpar.optim.optimizers import ELEMENTWISE
from tfpar.parallel import strategies, tensor_layout
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.split import move_to_devices, split_of, whole_elements
from tfpar.parallel.tensor_calls import divide_calls
from tfpar.training.core import Core
from tfpar.training.model.building import Original, build_model

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)


def axis_of(runtime: strategies.Runtime, layout: Mapping[str, str] | None = None) -> ModelAxis | None:
    """The model axis of a running strategy; None where every device has a whole model.

    Raises:
      ConfigError: A layout, and no devices to divide layers over.
    """
    topology = runtime.topology
    if topology.model_devices == 1:
        if layout:
            raise ConfigError("layout says how layers are divided, and no mesh divides them. Add mesh='model:2'.")
        return None
    return ModelAxis(runtime.strategy.extended.worker_devices, max(topology.worker, 0), topology.model_devices)


def devices_of(model: keras.Model, axis: ModelAxis | None) -> DevicesOfReplica | None:
    """What the exchange has to know of a divided model; None without an axis."""
    if axis is None:
        return None
    divided = [index for index, variable in enumerate(model.trainable_variables) if split_of(variable)]
    return DevicesOfReplica(axis.size, divided)


def on_host(
    model: keras.Model | Callable[[], keras.Model], strategy: tf.distribute.Strategy, *, announced: bool
) -> tuple[keras.Model, Original | None]:
    """Builds a model in the memory of the host, from which `divide` moves its parts: it need not fit on a device.

    Args:
      model: See `build_model`.
      strategy: The strategy under which it will be trained.
      announced: See `build_model`.

    Raises:
      ConfigError: See `build_model`; or the model was made under the strategy.
    """
    variables = model.variables if isinstance(model, keras.Model) else []
    if variables and strategy.extended.variable_created_in_scope(variables[0].value):
        raise ConfigError(
            "--mesh: the model was made under the strategy, whole on every device. Pass a function that "
            "builds it, or make it before the strategy."
        )
    with tf.device("CPU:0"):
        return build_model(model, strategy, announced=announced)


def divide(
    model: keras.Model, axis: ModelAxis, rules: Mapping[str, str] | None = None, *, announced: bool = False
) -> models.ModelSummary | None:
    """Divides a model that `on_host` has built. Call it under the strategy.

    Args:
      model: Its variables are replaced by ones under the strategy, and calls of its layers by divided ones.
      axis: The devices.
      rules: See `tensor_layout.find_layout`.
      announced: Whether to log what is divided.

    Returns:
      Size and cost of the whole model; None where its inputs are not known before it runs.

    Raises:
      ConfigError: Nothing can be divided, or a rule cannot hold; the model synchronises batch statistics.
    """
    if models.uses_synchronized_statistics(model):
        raise ConfigError(
            f"--mesh: model {model.name!r} synchronises batch statistics between replicas, which divided models cannot "
            "do yet. Use another normalization, or --mesh=data:... alone."
        )
    layouts = tensor_layout.find_layout(model, axis.size, rules)
    summary = None
    with contextlib.suppress(ValueError):
        summary = models.describe(model)
    splits = {
        id(getattr(layer, name)): split for layer, layout in layouts.values() for name, split in layout.splits.items()
    }
    divide_calls(layouts)
    for variable in model.variables:
        move_to_devices(variable, splits.get(id(variable)))
    if announced:
        _log.info("%s", _describe(model, axis, layouts))
    return summary


def check_divided(optimizer: keras.optimizers.Optimizer, core: Core) -> None:
    """Refuses what would need whole tensors, of which no device has all.

    Args:
      optimizer: Built for the model.
      core: The model.

    Raises:
      ConfigError: With what to use.
    """
    if core.overwritten:
        raise ConfigError(
            f"--mesh: model {core.model.name!r} has float8 layers, whose statistics are of whole tensors. Use "
            "--mesh=data:... alone."
        )
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(sorted(kind.__name__.lower() for kind in ELEMENTWISE))
        raise ConfigError(
            f"--mesh: {type(optimizer).__name__} looks at whole tensors, which are divided over devices. Use one that "
            f"updates every element by itself ({names}), or --mesh=data:... alone."
        )
    if optimizer.clipnorm or optimizer.global_clipnorm:
        raise ConfigError(
            f"--mesh: clipnorm and global_clipnorm of {type(optimizer).__name__} would see the part of one device. Use "
            "--clip_norm, which clips by the norm of the whole gradient."
        )


def _describe(model: keras.Model, axis: ModelAxis, layouts: tensor_layout.Layouts) -> str:
    whole = whole_elements(model.trainable_variables)
    own = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    ways = [layout.way for _, layout in layouts.values()]
    counts = ", ".join(f"{ways.count(way)} {way}" for way in tensor_layout.WAYS if way in ways)
    return (
        f"model axis: each of {axis.size} devices has {own:,} of {whole:,} trainable weights "
        f"({own / max(whole, 1):.0%}); layers divided: {counts}"
    )
