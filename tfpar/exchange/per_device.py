"""The exchange of replicas of several devices each.

Each place in a replica has its own parts or variables, which are summed over the devices at the same place in all
replicas: first within a worker, then over the workers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.collectives.tensorflow import group_of_place, world_group
from tfpar.config import ConfigError
from tfpar.exchange import buckets, residuals
from tfpar.exchange.compressed import CompressedReducer
from tfpar.exchange.dense_reducer import DenseReducer
from tfpar.exchange.gradients import Gradient
from tfpar.exchange.reducer import Reducer, ShouldApply, Traffic, local_replicas, replica_context
from tfpar.exchange.sharding.shards import ShardedVector
from tfpar.exchange.spec import Spec

import numpy as np
import tensorflow as tf

# Of the state of one place's exchange, where a worker has whole replicas, or one of several parts.
_NAME = re.compile(r"(part_of_(\d+x)?\d+_)?device_\d+(?=/)")
_DEVICES_OF_PART = 1 << 10  # numbers that the devices of one worker may have
_PARTS = "parts"  # of a place in an export: a digest of what it exchanges
_DECISIVE = 5  # scalars at the front of a sidecar that decide whether the step is applied: see `Sidecar.should_apply`


class DevicesOfReplica(NamedTuple):
    """How a replica is divided over several devices.

    Attributes:
      indices: For each place, the variables that it exchanges.
      programs: For each place, the index of the program, among those that the strategy runs for a replica, that has its
        gradients.
      devices: For each place, the device of this worker's first replica; empty if these are the strategy's devices.
      parts: Workers that hold a replica between them.
      part: Which of its parts this worker has, from 0.
      layer_parts: Workers that divide the same layers; the others have other layers.
      per_replica: Programs that the strategy runs for a replica on this worker; 0: those in `programs`. Programs that
        are not in `programs` have copies of what the first program exchanges, and nothing else.
      shards: For each place, which worker updates which weights, numbered within the place; empty if each updates all.
      micro_batches: Micro-batches of a step whose gradients are sent to the owners separately; 0: whole steps are.
      held_elsewhere: Places whose variables other workers of the replica have, too.
    """

    indices: Sequence[Sequence[int]]
    programs: Sequence[int]
    devices: Sequence[str] = ()
    parts: int = 1
    part: int = 0
    layer_parts: int = 1
    per_replica: int = 0
    shards: Sequence[Sequence[ShardedVector]] = ()
    micro_batches: int = 0
    held_elsewhere: Sequence[int] = ()

    @property
    def place_names(self) -> list[str]:
        """Names of the places in a checkpoint. They differ if residuals belong to other parts of the weights."""
        of_part = f"part_of_{self.parts // self.layer_parts}x{self.layer_parts}_" if self.parts > 1 else ""
        return [f"{of_part}device_{place}" for place in range(len(self.indices))]

    @property
    def program_count(self) -> int:
        """Programs that the strategy runs for a replica on this worker."""
        return self.per_replica or max(self.programs) + 1


def places_that_divide(divided: Sequence[int], variables: int, size: int) -> DevicesOfReplica:
    """The places of devices that each have parts of some variables, and copies of all others, which the first place
    exchanges.

    Args:
      divided: Indices of the variables that are divided.
      variables: Number of all.
      size: Number of devices.
    """
    return DevicesOfReplica([list(range(variables)), *[list(divided)] * (size - 1)], range(size))


def places_of_part(divided: Sequence[int], variables: int, programs: int, parts: int, part: int) -> DevicesOfReplica:
    """The places of a worker that holds a part of a replica. Each device has parts of some variables; whole variables
    are exchanged separately, so that all workers of the replica get the same result.

    Args:
      divided: Indices of the variables that are divided.
      variables: Number of all.
      programs: Number of this worker's devices.
      parts: Workers that hold a replica between them.
      part: Which of its parts this worker has, from 0.
    """
    whole = sorted({*range(variables)} - {*divided})
    places = [(whole, 0)] if whole else []
    places += [(list(divided), program) for program in range(programs)]
    indices, owners = zip(*places, strict=True)
    return DevicesOfReplica(indices, owners, parts=parts, part=part, layer_parts=parts)


def places_in_turn(
    stages: Sequence[int], devices: Sequence[Sequence[str]], divided: Sequence[int] = ()
) -> DevicesOfReplica:
    """The places of devices that each have the variables of some stages, or parts of them.

    Args:
      stages: For each variable, the number of its device within a program.
      devices: For each program of this worker's first replica, its devices.
      divided: Indices of the variables of which each program has a part. All have copies of the others, which the
        first program exchanges.
    """
    found = []
    for program, row in enumerate(devices):
        for stage, device in enumerate(row):
            own = [index for index, where in enumerate(stages) if where == stage and (not program or index in divided)]
            if own:
                found.append((own, program, device))
    indices, programs, names = zip(*found, strict=True)
    return DevicesOfReplica(indices, programs, names)


class PlacesReducer(Reducer):
    """The common parts of reducers that have one reducer for each place in a replica.

    Args:
      reducers: One for each place, of the tensors in `indices`; all with the same exchange.
      replica: How a replica is divided.
      devices: For each place, the device of this worker's first replica.
      groups: For each place, the devices of the first replica of each worker.
      shapes: Static shapes of a device's variables.

    Attributes:
      names: Names of the places in a checkpoint.
      digests: For each place, a digest of the variables, or parts of them, that it exchanges.
    """

    _decisive = _DECISIVE  # scalars of the sidecar that all but the first place sum

    def __init__(
        self,
        reducers: Sequence[Reducer],
        replica: DevicesOfReplica,
        devices: Sequence[str],
        groups: Sequence[Group],
        shapes: Sequence[tf.TensorShape],
    ) -> None:
        self.names = replica.place_names
        exchanged = [[(index, shapes[index].as_list()) for index in own] for own in replica.indices]
        apart = replica.held_elsewhere if replica.micro_batches else ()  # each holder has a residual of its own
        self.digests = [digest_of((what, "apart") if place in apart else what) for place, what in enumerate(exchanged)]
        self._reducers: Sequence[Reducer] = list(reducers)
        self.units = [each for reducer in reducers for each in reducer.units]
        self._indices = [list(each) for each in replica.indices]
        self._devices, self._groups = list(devices), list(groups)
        self._programs, self._workers = list(replica.programs), groups[0].size
        self._per_replica = replica.program_count
        self._instances = [allocate_instance_keys(1, group)[0] for group in groups]

    @property
    def devices(self) -> int:
        """Number of devices of a replica."""
        return len(self._reducers)

    @property
    def compresses(self) -> bool:
        """Whether gradients are encoded."""
        return self._workers > 1 and self._reducers[0].compresses

    @property
    def state(self) -> list[tf.Variable]:
        """The state of all places' exchanges."""
        return [variable for reducer in self._reducers for variable in reducer.state]

    @property
    def plan_table(self) -> str:
        """The choices of `auto` for the first place."""
        return self._reducers[0].plan_table

    def sum_vector(self, vector: tf.Tensor) -> tf.Tensor:
        """The sum of a short vector over all replicas. Called in a replica context."""

        def merged(strategy: tf.distribute.Strategy, value: Any) -> Any:
            sums: list[tf.Tensor] = []
            for program in range(self._per_replica):
                if program not in self._programs:  # it has a copy
                    sums.append(sums[0])
                    continue
                place = self._programs.index(program)
                with tf.device(self._devices[place]):
                    own = self._local_sum(strategy, value, place)
                    sums.append(self._groups[place].all_reduce(own, self._instances[place]))
            return self._dealt_out(strategy, sums)

        return replica_context().merge_call(merged, args=(vector,))

    def _by_program(
        self, strategy: tf.distribute.Strategy, given: Sequence[Any], found: Sequence[Mapping[int, Gradient]]
    ) -> list[list[Gradient]]:
        """All tensors for each program of a replica.

        Args:
          strategy: The strategy.
          given: The tensors of all programs. They are used for variables that no place of this worker has.
          found: For each place, its tensors by index. A program without a tensor of its own gets that of another place.
        """
        found_here = {index for place in self._indices for index in place}
        # Variables that no place of this worker has are empty.
        everything: dict[int, Gradient] = {
            index: strategy.experimental_local_results(value)[0]
            for index, value in enumerate(given)
            if index not in found_here
        }
        for parts in reversed(found):
            everything |= parts
        by_program = []
        for program in range(self._per_replica):
            own = dict(everything)
            for number, parts in zip(self._programs, found, strict=True):
                own |= parts if number == program else {}
            by_program.append([own[index] for index in range(len(given))])
        return by_program

    def _local_sum(self, strategy: tf.distribute.Strategy, value: Any, place: int) -> tf.Tensor:
        """The sum of a place's tensors over this worker's replicas, in their order."""
        total, *others = strategy.experimental_local_results(value)[self._programs[place] :: self._per_replica]
        for other in others:
            total = total + other
        return total

    def _dealt_out(self, strategy: tf.distribute.Strategy, by_program: Sequence[Any]) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: by_program[context.replica_id_in_sync_group % self._per_replica]
        )

    def bytes_per_step(self, replicas: int, sidecar_length: int) -> Traffic:
        """Bytes of the exchanges of all places of a worker."""
        if self._workers == 1:
            return Traffic("none", "local", 0, 0, 0)
        lengths = [sidecar_length, *[min(self._decisive, sidecar_length)] * (self.devices - 1)]
        parts = [
            reducer.bytes_per_step(self._workers, length)
            for reducer, length in zip(self._reducers, lengths, strict=True)
        ]
        largest = max(parts, key=lambda part: part.dense_bytes)
        return Traffic(
            largest.codec,
            f"per device, {largest.pattern}",
            *(sum(getattr(part, name) for part in parts) for name in ("payload_bytes", "wire_bytes", "dense_bytes")),
        )

    def export(self) -> dict[str, np.ndarray]:
        """The state of all places' exchanges, and what they exchange."""
        exported: dict[str, np.ndarray] = {}
        for place, digest, reducer in zip(self.names, self.digests, self._reducers, strict=True):
            if state := reducer.export():
                exported |= {f"{place}/{name}": array for name, array in state.items()}
                exported[f"{place}/{_PARTS}"] = np.array(digest, np.uint64)
        return exported

    def restore(self, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
        """Restores the exports of the same places."""
        for place, reducer in zip(self.names, self._reducers, strict=True):
            prefix = f"{place}/"

            def read_own(worker: int, prefix: str = prefix) -> dict[str, np.ndarray]:
                saved = read(worker).items()
                own = {name.removeprefix(prefix): array for name, array in saved if name.startswith(prefix)}
                return {name: array for name, array in own.items() if name != _PARTS}

            reducer.restore(workers, read_own)

    def observed(self) -> dict[str, float]:
        """The statistics of the exchange of the first place that encodes anything."""
        return next((found for reducer in self._reducers if (found := reducer.observed())), {})


class PerDeviceReducer(PlacesReducer):
    """Sums the gradients of each place in a replica. Variables of several places are exchanged once, by the first."""

    _reducers: Sequence[DenseReducer | CompressedReducer]

    def reduce(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sums this device's gradients, and the sidecar, over all replicas; see `Reducer`."""
        if self._workers == 1 and local_replicas(replica_context()) == self._per_replica:  # a replica alone
            return list(gradients), sidecar

        def merged(strategy: tf.distribute.Strategy, *values: Any) -> Any:
            *gradients, sidecar = values
            results = []
            for place, reducer in enumerate(self._reducers):
                with tf.device(self._devices[place]):
                    own = [self._local_sum(strategy, gradients[index], place) for index in self._indices[place]]
                    # The scalars for `should_apply` come first.
                    vector = self._local_sum(strategy, sidecar, place)[: _DECISIVE if place else None]
                    reduced, vector = reducer.reduce_on_device(own, vector, should_apply)
                results.append((dict(zip(self._indices[place], reduced, strict=True)), vector))
            by_program = self._by_program(strategy, gradients, [parts for parts, _ in results])
            return self._dealt_out(strategy, [(sums, results[0][1]) for sums in by_program])

        return replica_context().merge_call(merged, args=(*gradients, sidecar))


def check_saved_devices(reducer: Reducer, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
    """Refuses residuals of parts that the devices of this run do not have.

    Args:
      reducer: The reducer that would restore them.
      workers: Number of workers of the saved run.
      read: Returns the export of the worker with a rank.

    Raises:
      ConfigError: The saved run had another model axis.
    """
    first = read(0)
    saved = {found[0] for found in map(_NAME.match, first) if found}
    own = {*reducer.names} if isinstance(reducer, PlacesReducer) else set()
    if (saved and saved != own) or (own and not saved and residuals.pending_elements(workers, read)):
        on_workers = any(name.startswith("part_of_") for name in saved)
        before = "on other workers" if on_workers else f"of {len(saved) or 'one'} device{'s' * (len(saved) > 1)} each"
        raise ConfigError(
            f"--mesh: the saved run had replicas {before}, and its residuals belong to their parts of the weights. "
            "Resume with the previous --mesh, or start in another --workdir with --warm_start."
        )
    digests = dict(zip(reducer.names, reducer.digests, strict=True)) if isinstance(reducer, PlacesReducer) else {}
    known = {name: first.get(f"{name}/{_PARTS}") for name in digests}  # older checkpoints have none
    if any(digest is not None and int(digest) != digests[name] for name, digest in known.items()):
        raise ConfigError(
            "--mesh: the devices of the saved run had other layers or other parts of them (another --mesh, --stages, "
            "--shard or layout), and its residuals belong to those. Resume with the previous ones, or start in another "
            "--workdir with --warm_start."
        )


def digest_of(what: object) -> int:
    """Returns a number of 64 bits that differs if the `repr` of an object does, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little")


def groups_of_places(
    group: Group, strategy: tf.distribute.Strategy, replica: DevicesOfReplica
) -> tuple[list[str], list[Group]]:
    """For each place in a replica, its device in this worker's first replica, and its group of all workers' devices.

    Args:
      group: The workers that hold the same parts of a replica.
      strategy: The strategy of this worker's devices.
      replica: How a replica is divided over them.
    """
    running = strategy.extended.worker_devices
    devices = [*(replica.devices or [running[program] for program in replica.programs])]
    # By device, not by place: TensorFlow keeps the devices of a group until the process ends, and the places of the
    # next model, or of a fragment of it, may be on other devices.
    of_device = [tf.DeviceSpec.from_string(device).device_index or 0 for device in devices]
    numbered = zip([replica.part * _DEVICES_OF_PART + index for index in of_device], devices, strict=True)
    return devices, [group_of_place(number, group, device) for number, device in numbered]


def per_device_reducer(
    spec: Spec,
    shapes: Sequence[tf.TensorShape],
    group: Group,
    strategy: tf.distribute.Strategy,
    seed: int,
    replica: DevicesOfReplica,
) -> PerDeviceReducer:
    """The exchange `spec` for every place in a replica.

    Args:
      spec: The exchange.
      shapes: Static shapes of a device's variables.
      group: The workers that hold the same parts of a replica.
      strategy: The strategy of this worker's devices.
      seed: Seed of stochastic rounding.
      replica: How a replica is divided over them.
    """
    running = strategy.extended.worker_devices
    devices, groups = groups_of_places(group, strategy, replica)
    measured = None
    if group.size > 1 and spec.algorithm.measure:
        # Once, by all workers at the same time: the parts of a replica must encode what they share alike.
        everyone = world_group(replica.parts * group.size, group.members[group.rank], running[0])
        measured = spec.algorithm.measured(spec, everyone, running[0])
    reducers: list[DenseReducer | CompressedReducer] = []
    for own, device, chosen in zip(groups, devices, replica.indices, strict=True):
        own_shapes = [shapes[index] for index in chosen]
        if group.size > 1 and spec.compresses:
            reducers.append(CompressedReducer(spec, own_shapes, own, device, seed, measured=measured))
        else:
            reducers.append(DenseReducer(own_shapes, own, device, buckets.DENSE_BUCKET_BYTES))
    return PerDeviceReducer(reducers, replica, devices, groups, shapes)
