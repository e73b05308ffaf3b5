"""The elements of an input pipeline on the devices of a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpar import inputs
from tfpar.parallel.topology import Topology

import tensorflow as tf


def elements_on_devices(
    pipeline: inputs.AnyPipeline,
    topology: Topology,
    strategy: tf.distribute.Strategy,
    shorten: Callable[[tf.data.Dataset], tf.data.Dataset],
    start: int,
    *,
    several: bool,
) -> Any:
    """Returns the elements of a pipeline, one per replica of this worker.

    Args:
      pipeline: The pipeline.
      topology: The topology of the run.
      strategy: Its strategy.
      shorten: Removes the padding of a dataset's elements, where the model needs that.
      start: The first step.
      several: Whether parts of replicas have devices of their own, see `Placing.several`.

    Returns:
      A dataset, or a distributed dataset.
    """
    if topology.local_replicas == 1 and (topology.device_type == "CPU" or several):
        # Nothing to hand out: a distributed iterator would cost 0.2 ms a step (TensorFlow 2.21, GeneratorDataset).
        return shorten(pipeline.dataset(topology.data_worker, 1, start))
    if isinstance(pipeline, inputs.StreamPipeline) and topology.device_type != "TPU":
        # One iterator on the host, whose position tf.data can save: one that prefetches to several devices has none
        # (TensorFlow 2.21, `OwnedMultiDeviceIterator`). `replica.next_batch` hands its rows out.
        return pipeline.dataset(topology.data_worker, topology.local_replicas, stacked=True)
    if several:
        local = topology.local_replicas
        return pipeline.dataset(topology.data_worker, local, start).batch(local, drop_remainder=True)

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = topology.replicas // topology.input_pipelines
        return shorten(pipeline.dataset(context.input_pipeline_id, replicas, start))

    options = tf.distribute.InputOptions(experimental_fetch_to_device=topology.device_type != "CPU")
    return strategy.distribute_datasets_from_function(dataset, options)
