"""Refuses options and models that cannot be cut into segments, before anything starts."""

from __future__ import annotations

from typing import NamedTuple

from tfpar import models
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.config.sections.train import AUTO_SEGMENTS
from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.topology import Topology

import keras


class Obstacle(NamedTuple):
    """Why passes cannot be cut into segments.

    Attributes:
      reason: The reason, as a sentence without its full stop; if it concerns a model, also without its subject.
      remedy: What to do.
    """

    reason: str
    remedy: str = "Leave one of them out."


def obstacle(config: ExperimentConfig, topology: Topology) -> Obstacle | None:
    """The first option that does not work with `--jit_segments`; None if there is none."""
    train = config.train
    if topology.name in ("parameter_server", "tpu"):
        why = "exchanges no gradients" if topology.name == "parameter_server" else "compiles a step as one program"
        return Obstacle(f"segments do not work with --strategy={topology.name}, which {why}", "Leave it out.")
    if topology.mesh.model > 1 or topology.mesh.pipeline > 1 or topology.replica_workers > 1:
        return Obstacle(f"segments do not work with --mesh={config.strategy.mesh}, whose layers are cut already")
    if topology.replicas == 1:
        return Obstacle("a single replica exchanges nothing, so nothing could begin earlier", "Leave it out.")
    if train.jit_compile == "false":
        return Obstacle(
            "segments do not work with --jit_compile=false: without XLA, the exchange overlaps the backward pass anyway"
        )
    if train.accumulate_steps > 1:
        return Obstacle(
            f"segments do not work with --accumulate_steps={train.accumulate_steps}: gradients are complete only after "
            "the last micro-batch, all of them at once"
        )
    if train.shard != "none":
        return Obstacle(f"segments do not work with --shard={train.shard} yet")
    if config.outer.uses_rounds:
        return Obstacle(
            f"segments do not work with --local_steps={config.outer.local_steps}: no gradients are exchanged"
        )
    return None


def check_segments(config: ExperimentConfig, topology: Topology) -> None:
    """Refuses options that do not work with a number of segments; with `auto`, there is then one segment.

    Raises:
      ConfigError: The first of them, with what to use instead.
    """
    number = config.train.jit_segments
    if number not in (1, AUTO_SEGMENTS) and (found := obstacle(config, topology)):
        raise ConfigError(f"--jit_segments={number}: {found.reason}. {found.remedy}")


def model_obstacle(model: keras.Model) -> Obstacle | None:
    """The first property of a built model that segments do not work with; None if there is none."""
    if models.uses_synchronized_statistics(model):
        return Obstacle(
            "synchronises batch statistics between replicas, which no XLA program can",
            "Use another normalization (--model_args=normalization=batch), or leave it out.",
        )
    if keras_calls.graph_of(model) is None:
        return Obstacle(
            "has its own call method, not a graph of layers, so it cannot be cut",
            "Build it with the functional API or as a Sequential, or leave it out.",
        )
    if any(isinstance(layer, keras.layers.RNN) for layer in keras_internals.all_layers(model)):
        # Their lists of tensors: "Support for TensorList crossing the XLA/TF boundary is not implemented".
        return Obstacle(
            "has recurrent layers, whose state cannot leave an XLA program for the backward pass (TensorFlow 2.21)",
            "Leave it out.",
        )
    if any(variable.overwrite_with_gradient for variable in model.trainable_variables):
        return Obstacle("has float8 layers, which segments cannot train yet", "Leave it out.")
    return None
