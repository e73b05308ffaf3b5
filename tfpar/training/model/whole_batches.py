"""Models that compute over whole batches, and batches that are not full.

A batch that is not full is padded with examples of weight 0. Losses and metrics per example leave them out.
Computations on the batch as a whole cannot: batch statistics, losses that the model adds itself, metrics that it
updates itself, an overridden `compute_loss`, and a loss that returns one value for the batch. If a replica's share of
a step is one micro-batch, such a model gets only its real examples, in a smaller batch, as in `fit`; XLA compiles the
step once for each size.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar import inputs, models
from tfpar.config import ConfigError, InputConfig
from tfpar.optim import keras_internals
from tfpar.parallel.topology import Topology
from tfpar.training.core import Core
from tfpar.training.model.own_loss import OwnLossObjective, is_mean_over_examples
from tfpar.training.objective import Objective, SupervisedObjective

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BatchReaders:
    """The parts of a model that read a batch as a whole.

    Attributes:
      name: Name of the model.
      topology: The topology of the run.
      own_loss: Whether it overrides `compute_loss`.
      metrics: Names of the metrics that it updates itself.
      statistics: Names of Keras' layers with batch statistics; tfpar's own ignore padding.
      seen_adding: Names of the layers that, judging by the code of their `call`, add losses that depend on examples.
      fixed_batch: Whether an input has a fixed number of examples.
      objective: What the model is trained for.
    """

    name: str
    topology: Topology
    own_loss: bool
    metrics: Sequence[str]
    statistics: Sequence[str]
    seen_adding: Sequence[str]
    fixed_batch: bool
    objective: Objective
    _tried: list[inputs.AnySource] = dataclasses.field(default_factory=list, repr=False)

    @classmethod
    def of(cls, core: Core, topology: Topology) -> BatchReaders:
        """The parts of a core's model that read whole batches."""
        layers = keras_internals.all_layers(core.model)
        given = getattr(core.model, "inputs", None) or []
        return cls(
            name=core.model.name,
            topology=topology,
            own_loss=isinstance(core.objective, OwnLossObjective),
            metrics=[metric.name for metric in core.model_metrics],
            statistics=[layer.name for layer in layers if _takes_statistics(layer)],
            seen_adding=[layer.name for layer in layers if _adds_loss(layer)],
            fixed_batch=any(one.shape[0] is not None for one in keras.tree.flatten(given)),
            objective=core.objective,
        )

    @property
    def whole_losses(self) -> Mapping[str, bool]:
        """Losses that return one value for a batch, and whether it is a mean; known once there are data."""
        return self.objective.whole_losses if isinstance(self.objective, SupervisedObjective) else {}

    @property
    def reading_losses(self) -> Sequence[str]:
        """Losses whose values for an example depend on the others of the batch; known once there are data."""
        return self.objective.reading_losses if isinstance(self.objective, SupervisedObjective) else ()

    @property
    def adding(self) -> Sequence[str]:
        """Names of layers that add losses that depend on examples; some are known only once there are data."""
        if self.seen_adding or not isinstance(self.objective, SupervisedObjective):
            return self.seen_adding
        return self.objective.layers_adding_losses

    def get_examples_alone(self, pipeline: inputs.AnyPipeline) -> bool:
        """Whether a pipeline returns incomplete batches without their padding.

        Micro-batches are rows of one tensor, so they have the same size; so do the shares of replicas that get rows of
        one tensor (from a stream, or for several devices each), and of a TPU. Devices and workers that communicate
        within a model must keep their shapes, because TensorFlow's collectives (2.21) fix the shape of every call.
        """
        topology = self.topology
        losses = self.own_loss or self.whole_losses or self.reading_losses
        rows = isinstance(pipeline, inputs.StreamPipeline) or topology.mesh.devices_of_replica > 1
        stacked = rows and topology.local_replicas > 1
        return (
            pipeline.pads
            and bool(losses or self.metrics or self.statistics or self.adding)
            and pipeline.element_spec[2].shape[0] == 1
            and not (self.fixed_batch or stacked)
            and topology.synchronous
            and topology.device_type != "TPU"
            and topology.model_devices * topology.replica_workers == 1
            and not topology.shards_weights
        )

    def shorten(self, pipeline: inputs.AnyPipeline, dataset: tf.data.Dataset, *, padded: bool) -> tf.data.Dataset:
        """A pipeline's batches of one replica each, without their padding unless they must be `padded`."""
        return dataset if padded or not self.get_examples_alone(pipeline) else without_padding(dataset)

    def counting_padding(self, pipeline: inputs.AnyPipeline) -> tuple[Sequence[str], Sequence[str]]:
        """Names of the layers that count padding as examples: those that add losses, and those with batch
        statistics."""
        counts = pipeline.pads and not self.get_examples_alone(pipeline)
        return (self.adding, self.statistics) if counts else ((), ())

    def distorted_metrics(self, pipeline: inputs.AnyPipeline) -> Sequence[str]:
        """Names of the model's metrics that would count padding."""
        return self.metrics if pipeline.pads and not self.get_examples_alone(pipeline) else ()

    def check(
        self, pipeline: inputs.AnyPipeline, source: inputs.AnySource, config: InputConfig, *, training: bool
    ) -> None:
        """Refuses padding that a loss over whole batches would count, or, in training, the model's own metrics.

        Raises:
          ConfigError: With what to do.
        """
        self._check_parts(pipeline)
        if training:
            self._warn_of_parts(pipeline, source)
        if self.own_loss:
            what = f"model {self.name!r} overrides compute_loss"
        elif self.whole_losses:
            what = f"loss {next(iter(self.whole_losses))!r} returns one value for a batch, not one per example"
        elif self.reading_losses:
            what = f"loss {self.reading_losses[0]!r} compares each example with the others of its batch"
        elif self.metrics and training:
            what = f"model {self.name!r} updates metrics of its own ({', '.join(self.metrics)})"
        else:
            return
        if not pipeline.pads or self.get_examples_alone(pipeline):
            return
        remedies = ["--remainder=drop leaves an incomplete last batch out"] if training else []
        remedies.append(f"choose a --global_batch_size that divides the {source.info.num_examples} examples")
        raise ConfigError(
            f"{what}, which sees whole batches and would count padding: {source.info.name} has batches of "
            f"{config.global_batch_size} with padding (an incomplete last batch, a batch that replicas and "
            f"micro-batches do not divide, or --on_bad_record=skip). What to do: {'; or '.join(remedies)}."
        )

    def _check_parts(self, pipeline: inputs.AnyPipeline) -> None:
        """Refuses a loss of a whole batch that is not the mean of the losses of its parts, on replicas or in
        micro-batches."""
        parts = self.topology.replicas * pipeline.element_spec[2].shape[0]
        undivided = [name for name, is_mean in self.whole_losses.items() if not is_mean]
        if undivided and parts > 1:
            raise ConfigError(
                f"loss {undivided[0]!r} returns one value for a batch, which is not the mean of what it returns for "
                f"the {parts} parts of the batch on replicas and in micro-batches. Let it keep one value per example, "
                "as keras.losses.Dice(axis=(1, 2, 3)) does, or train on one device without --accumulate_steps."
            )

    def _warn_of_parts(self, pipeline: inputs.AnyPipeline, source: inputs.AnySource) -> None:
        """Warns once of what depends on how a batch is divided: a loss that compares examples, or a `compute_loss`."""
        topology = self.topology
        parts = topology.replicas * pipeline.element_spec[2].shape[0]
        if self.reading_losses and parts > 1 and not self._tried:
            self._tried.append(source)
            if topology.is_chief:
                _log.warning(
                    "loss %r compares each example with the others of its part of a batch, one of %s (replicas, "
                    "micro-batches), as under tf.distribute. On one device without --accumulate_steps it sees whole "
                    "batches, as in fit",
                    *(self.reading_losses[0], parts),
                )
            return
        whole = topology.model_devices * topology.replica_workers == 1 and not topology.shards_weights
        if self._tried or parts == 1 or not (whole and isinstance(source, inputs.Source)):
            return
        self._tried.append(source)
        objective = self.objective
        if not isinstance(objective, OwnLossObjective) or is_mean_over_examples(objective, source):
            return
        if topology.is_chief:
            _log.warning(
                "model %s: its compute_loss is not a mean over examples, so a batch in %s parts (replicas, "
                "micro-batches) has a different loss than in one part, as under tf.distribute. One device without "
                "--accumulate_steps trains as fit does",
                *(self.name, parts),
            )


def warn_of_left_out(names: Sequence[str], source: inputs.AnySource) -> None:
    """Says which of the model's metrics an evaluation on a source leaves out; nothing if there are none."""
    if names:
        _log.warning(
            "evaluation on %s leaves out %s, which the model updates itself and padding would distort; a "
            "--global_batch_size that divides its %s examples needs no padding",
            *(source.info.name, ", ".join(names), source.info.num_examples),
        )


def without_padding(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The batches of one replica without examples of weight 0; if all have weight 0, the first one stays.

    Args:
      dataset: Elements `(x, y, weight)`: x and y `[1, m, ...]`, weight float32 `[1, m]`.

    Returns:
      The same with `n <= m` in place of m, which is unknown to the graph.
    """

    def shortened(*element: Any) -> Any:
        weight = element[-1][0]
        kept = tf.where(weight > 0)[:, 0]
        kept = tf.cond(tf.size(kept) > 0, lambda: kept, lambda: tf.zeros([1], tf.int64))
        full = tf.size(kept) == tf.size(weight)
        return tf.cond(
            full,
            lambda: element,
            lambda: tf.nest.map_structure(lambda part: tf.gather(part, kept, axis=1), element),
        )

    return dataset.map(shortened)


def _takes_statistics(layer: keras.layers.Layer) -> bool:
    ours = isinstance(layer, models.BatchNormalization)
    return isinstance(layer, keras.layers.BatchNormalization) and not ours and layer.trainable


def _adds_loss(layer: keras.layers.Layer) -> bool:
    code = getattr(inspect.unwrap(type(layer).call), "__code__", None)
    return layer.activity_regularizer is not None or "add_loss" in getattr(code, "co_names", ())
