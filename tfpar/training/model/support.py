"""Features of models that need special treatment: their own metrics, and features that are refused by name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from tfpar import models, precision
from tfpar.config import PRECISIONS, ConfigError
from tfpar.optim import keras_internals

import keras
import numpy as np

_log = logging.getLogger(__name__)

_PLAIN_FIT = "Run the model's own fit with tfpar.DistributedOptimizer(optimizer), which trains it on any cluster"


def check_model(model: keras.Model, *, synchronous: bool = True) -> None:
    """Refuses, before anything is traced, models whose training in Keras' `fit` cannot be reproduced here.

    Args:
      model: A built Keras model.
      synchronous: Whether replicas take steps together; not with parameter servers.

    Raises:
      ConfigError: A stateful layer, an overridden training loop, no trainable weights, or a layer without its weights;
        with parameter servers, weights that a forward pass assigns. The message says what to do.
    """
    if not model.weights:  # even if a subclassed model without its own `build` is marked as built
        if getattr(model, "inputs", None):  # made of layers that have none
            raise ConfigError(
                f"the model {model.name!r} has no weights, so there is nothing to train. Its own evaluate and predict "
                "need no Trainer."
            )
        raise ConfigError("the model has no weights yet: call it on data or give it an Input, or pass a function.")
    if not model.trainable_variables:
        raise ConfigError(
            f"the model {model.name!r} has no trainable weights, so there is nothing to train. Set "
            "trainable=True on the layers that should learn, or only evaluate it."
        )
    stateful = [layer.name for layer in keras_internals.all_layers(model) if getattr(layer, "stateful", False) is True]
    if stateful:
        raise ConfigError(
            f"the layers {', '.join(stateful)} of model {model.name!r} are stateful=True: their state belongs to a row "
            "of the batch, and here the order of examples and the number of replicas decide which example a row "
            f"holds. Set stateful=False and give whole sequences. Or: {_PLAIN_FIT}, with batches in your own order."
        )
    _check_all_are_built(model)
    if any(map(keras_internals.is_rematerialized, keras_internals.all_layers(model))):
        raise ConfigError(
            f"model {model.name!r} has layers made in a keras.RematScope. On TensorFlow, Keras 3.15 gives their "
            "weights no gradient unless they are read from variables, and the step passes tensors: they would not "
            f"learn. Build the model outside the scope. Or: {_PLAIN_FIT}."
        )
    if not synchronous:
        _check_weights_stay(model)
    for name in ("train_step", "make_train_function"):
        if owner := overriding_class(model, name):
            raise ConfigError(
                f"model {model.name!r}: {owner} overrides {name}, which the Trainer's own step replaces. "
                f"{_PLAIN_FIT}. If only the loss differs, override compute_loss, or call add_loss in call."
            )
    for name, remedy in (
        ("test_step", "evaluation here computes the Trainer's loss and metrics in inference mode"),
        ("predict_step", "Trainer.predict returns the outputs of call"),
        ("compute_metrics", "give the metrics to Trainer(metrics=...), or update them in call"),
    ):
        if owner := overriding_class(model, name):
            _log.warning("model %s: %s overrides %s, which is not called: %s", model.name, owner, name, remedy)


def _check_all_are_built(model: keras.Model) -> None:
    """Refuses weights that do not exist yet: Keras (3.15) builds a layer that is the activation of another one when the
    model is called for the first time, and the step has the weights that the model has before."""
    for layer in keras_internals.all_layers(model):
        activation = getattr(layer, "activation", None)
        if not isinstance(activation, keras.layers.Layer) or activation.built:
            continue
        if type(activation).build is not keras.layers.Layer.build:
            raise ConfigError(
                f"the layer {layer.name!r} of model {model.name!r} has the layer {activation.name!r}, a "
                f"{type(activation).__name__}, as its activation, which is not built before the model is called. Put "
                "it behind that layer instead, or call the model on a batch (of zeros) first."
            )


def _check_weights_stay(model: keras.Model) -> None:
    """Refuses layers that set weights other than by gradients, which asynchronous workers do not support."""
    layers = [
        layer.name
        for layer in keras_internals.all_layers(model)
        if isinstance(layer, keras.layers.SpectralNormalization)
        or any(variable.overwrite_with_gradient for variable in keras_internals.weights_made_to_learn(layer))
    ]
    if layers:
        raise ConfigError(
            f"--strategy=parameter_server: the layers {', '.join(layers)} of model {model.name!r} set weights "
            "themselves (SpectralNormalization, float8), and workers that train asynchronously cannot agree on them. "
            "Use --strategy=multi_worker."
        )


def overriding_class(model: keras.Model, method: str) -> str:
    """The name of the class outside Keras that overrides a method of `keras.Model`; empty for none."""
    for kind in type(model).__mro__:
        if method in vars(kind):
            return "" if kind.__module__.partition(".")[0] == "keras" else kind.__name__
    return ""


def check_precision(model: keras.Model, wanted: str, *, announced: bool = False) -> None:
    """Refuses a model that was built to compute in a precision other than that of `--precision`.

    Args:
      model: A built Keras model.
      wanted: Name of a dtype policy.
      announced: Whether to log that a float64 model is trained.

    Raises:
      ConfigError: The model computes in another precision; float64 models are accepted.
    """
    dtype = precision.policy(wanted).compute_dtype
    layers = keras_internals.all_layers(model, include_self=False)
    used = {layer.compute_dtype for layer in layers if layer.weights}
    if used == {"float64"} and dtype == "float32":  # Keras' floatx, or the policies of the layers
        if announced:
            _log.info(
                "model %s: weights and layers are float64; loss, gradients and their exchange are float32", model.name
            )
        return
    if used and dtype not in used:
        mixed = f"mixed_{next(iter(used))}" if len(used) == 1 else ""
        suited = f"Use --precision={mixed} (precision={mixed!r}), or pass" if mixed in PRECISIONS else "Pass"
        raise ConfigError(
            f"--precision={wanted}: the model was built to compute in {', '.join(sorted(used))}. {suited} a function "
            "that builds it, or build it after tfpar.initialize(config)."
        )


def own_metrics(model: keras.Model, taken: Sequence[str] = ()) -> list[keras.metrics.Metric]:
    """Metrics that are attributes of the model and its layers and may be updated in `call`; without those of `compile`.

    Args:
      model: A built Keras model.
      taken: Names of other metrics of the run.

    Raises:
      ConfigError: A metric whose state does not start at zero, so that it is not a sum over batches; a name used twice.
    """
    found: list[keras.metrics.Metric] = []
    for layer in keras_internals.all_layers(model):
        for metric in keras_internals.metrics_made_in(layer):
            if any(metric is other for other in found):
                continue
            where = f"the metric {metric.name!r} that layer {layer.name!r} of model {model.name!r} has"
            metric.reset_state()
            if any(np.any(variable.numpy()) for variable in metric.variables):
                raise ConfigError(
                    f"{where} does not start at zero, so it is not a sum and cannot be combined across replicas. Use "
                    "a metric that counts or averages (Mean, Sum), or give it to Trainer(metrics=...)."
                )
            if metric.name in (*taken, *(other.name for other in found)):
                raise ConfigError(f"{where} has the name of another metric. Give one of them another name=....")
            found.append(metric)
    return found


def known_summary(model: keras.Model) -> models.ModelSummary | None:
    """Size and cost of a model; None if its inputs are not known before it runs."""
    with contextlib.suppress(ValueError):
        return models.describe(model)
    return None
