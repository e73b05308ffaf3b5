"""The exchange of replicas that are several devices each: device by device.

Devices of a worker hold different parts of the weights, so that nothing is added up within a worker. What a device
computes is summed over the devices of the same place on all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.collectives.tensorflow import group_of_place
from tfpar.config import ConfigError
from tfpar.exchange import buckets, residuals
from tfpar.exchange.compressed import CompressedReducer
from tfpar.exchange.dense import DenseReducer
from tfpar.exchange.gradients import Gradient
from tfpar.exchange.reducer import Reducer, ShouldApply, Traffic, replica_context
from tfpar.exchange.spec import Spec

import numpy as np
import tensorflow as tf

_PREFIX = "device_"  # of the state of one device's exchange


class PerDeviceReducer(Reducer):
    """Sums each device's gradients over the workers.

    Args:
      reducers: One for each device of this worker, over the devices of the same place on all workers; all with the same
        exchange.
      devices: Names of these devices.
      groups: Their groups.
    """

    def __init__(
        self, reducers: Sequence[DenseReducer | CompressedReducer], devices: Sequence[str], groups: Sequence[Group]
    ) -> None:
        self._reducers = list(reducers)
        self._devices = list(devices)
        self._groups = list(groups)
        self._alone = groups[0].size == 1
        self._instances = [allocate_instance_keys(1, group)[0] for group in groups]

    @property
    def devices(self) -> int:
        """Number of devices of a worker."""
        return len(self._devices)

    @property
    def compresses(self) -> bool:
        """Whether gradients are encoded."""
        return not self._alone and self._reducers[0].compresses

    @property
    def state(self) -> list[tf.Variable]:
        """The state of all devices' exchanges."""
        return [variable for reducer in self._reducers for variable in reducer.state]

    @property
    def plan_table(self) -> str:
        """What `auto` has decided for the first device."""
        return self._reducers[0].plan_table

    def reduce(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sums this device's gradients, and the sidecar, over the workers; see `Reducer`."""
        if self._alone:
            return list(gradients), sidecar

        def merged(strategy: tf.distribute.Strategy, *values: Any) -> Any:
            *gradients, sidecar = ([*strategy.experimental_local_results(value)] for value in values)
            sums = []
            for number, (reducer, device) in enumerate(zip(self._reducers, self._devices, strict=True)):
                with tf.device(device):
                    own = [parts[number] for parts in gradients]
                    sums.append(reducer.reduce_on_device(own, sidecar[number], should_apply))
            count = len(self._devices)
            return strategy.experimental_distribute_values_from_function(
                lambda context: sums[context.replica_id_in_sync_group % count]
            )

        return replica_context().merge_call(merged, args=(*gradients, sidecar))

    def bytes_per_step(self, replicas: int, sidecar_length: int) -> Traffic:
        """Bytes of the exchanges of all devices of a worker."""
        if self._alone:
            return Traffic("none", "local", 0, 0, 0)
        parts = [reducer.bytes_per_step(replicas, sidecar_length) for reducer in self._reducers]
        return Traffic(
            parts[0].codec,
            f"per device, {parts[0].pattern}",
            *(sum(getattr(part, name) for part in parts) for name in ("payload_bytes", "wire_bytes", "dense_bytes")),
        )

    def sum_vector(self, vector: tf.Tensor) -> tf.Tensor:
        """The sum of a short vector over the workers. Called in a replica context."""
        context = replica_context()
        number = int(tf.get_static_value(context.replica_id_in_sync_group)) % len(self._devices)
        return self._groups[number].all_reduce(vector, self._instances[number])

    def export(self) -> dict[str, np.ndarray]:
        """The state of all devices' exchanges."""
        return {
            f"{_PREFIX}{number}/{name}": array
            for number, reducer in enumerate(self._reducers)
            for name, array in reducer.export().items()
        }

    def restore(self, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
        """Takes up what devices of the same places exported."""
        for number, reducer in enumerate(self._reducers):
            prefix = f"{_PREFIX}{number}/"

            def read_own(worker: int, prefix: str = prefix) -> dict[str, np.ndarray]:
                saved = read(worker).items()
                return {name.removeprefix(prefix): array for name, array in saved if name.startswith(prefix)}

            reducer.restore(workers, read_own)

    def observed(self) -> dict[str, float]:
        """What the first device's exchange shows."""
        return self._reducers[0].observed()


def check_saved_devices(reducer: Reducer, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
    """Refuses residuals of parts of weights that the devices here do not have.

    Args:
      reducer: What takes them up.
      workers: Number of workers of the saved run.
      read: Returns the export of the worker with a rank.

    Raises:
      ConfigError: The saved run had another model axis.
    """
    saved = {name.partition("/")[0] for name in read(0) if name.startswith(_PREFIX)}
    own = reducer.devices if isinstance(reducer, PerDeviceReducer) else 0
    if (saved and len(saved) != own) or (own and not saved and residuals.has_pending(workers, read)):
        before = f"of {len(saved)} devices each" if saved else "of one device each"
        raise ConfigError(
            f"--mesh: the saved run had replicas {before}, and what its codec has not sent yet is of their parts of "
            "the weights. Resume with the previous --mesh, or start in another --workdir with --warm_start."
        )


def per_device_reducer(
    spec: Spec, shapes: Sequence[tf.TensorShape], group: Group, devices: Sequence[str], seed: int
) -> PerDeviceReducer:
    """The exchange `spec` for every device.

    Args:
      spec: The exchange.
      shapes: Static shapes of what a device has.
      group: All workers.
      devices: Names of this worker's devices.
      seed: Seed of stochastic rounding.
    """
    reducers: list[DenseReducer | CompressedReducer] = []
    groups = [group_of_place(place, group.size, group.rank, device) for place, device in enumerate(devices)]
    for own, device in zip(groups, devices, strict=True):
        if group.size > 1 and spec.compresses:
            reducers.append(CompressedReducer(spec, shapes, own, device, seed))
        else:
            reducers.append(DenseReducer(shapes, own, device, buckets.DENSE_BUCKET_BYTES))
    return PerDeviceReducer(reducers, devices, groups)
