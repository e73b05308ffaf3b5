"""The state of local steps in each worker's file of a checkpoint, and how a run resumes from it.

The checkpoint itself has the outer weights, the outer optimizer, and the inner optimizer of worker 0. A worker's own
file has the state that differs between workers: its inner optimizer, its loss scale, and within a round its inner
weights and state. With the same number of workers, a run resumes with the same bits. With another number, it first ends
the round in progress with the movements of all saved workers, and begins with the mean of their inner optimizers.

The file of a worker that holds only a part of a replica has the values of its own devices, which no other division of
the model can use: such a run resumes with another division only if no round is in progress, from the inner optimizer of
the first replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tfpar.config import ConfigError
from tfpar.exchange.per_device import digest_of
from tfpar.outer.local.parts import shape_here, value_here
from tfpar.outer.local.rounds import Rounds
from tfpar.outer.local.streaming import Streaming
from tfpar.parallel.held import held_by
from tfpar.parallel.split import shape_of, split_of
from tfpar.precision import LossScale

import keras
import numpy as np
import tensorflow as tf

_PREFIX = "local/"

Arrays = Mapping[str, np.ndarray]
AnyRounds = Rounds | Streaming


def is_local(name: str) -> bool:
    """Whether an array of a worker's file belongs to its local steps."""
    return name.startswith(_PREFIX)


def export(rounds: AnyRounds, loss_scale: LossScale | None) -> dict[str, np.ndarray]:
    """Returns the state that only this worker has, for its file of a checkpoint.

    Args:
      rounds: The rounds of this worker, at a stop between steps.
      loss_scale: This worker's loss scale, or None.
    """
    arrays = {"round": np.array([rounds.pending, rounds.weight, rounds.done], np.float64)}
    if loss_scale is not None:
        arrays["loss_scale"] = np.array([loss_scale.scale.numpy(), loss_scale.good_steps.numpy()], np.float64)
    if rounds.parts.workers > 1:
        arrays["division"] = np.array(_division(rounds.model_variables), np.uint64)
    groups = {"kept": [*map(value_here, rounds.kept)]}
    if rounds.worker:  # the checkpoint itself has the inner optimizer of worker 0
        groups["optimizer"] = [*map(value_here, rounds.inner.variables)]
    if rounds.under_way:
        groups["inner"] = rounds.inner_values()
    for group, values in groups.items():
        arrays |= {f"{group}/{number}": np.array(value, order="C") for number, value in enumerate(values)}
    arrays |= rounds.export()
    return {_PREFIX + name: array for name, array in arrays.items()}


def restore(
    rounds: AnyRounds, saved_workers: int, saved_parts: int, read: Callable[[int], Arrays]
) -> tuple[LossScale | None, str]:
    """Continues where the workers of a saved run stopped. All variables of the checkpoint have been restored.

    Args:
      rounds: The rounds of this run.
      saved_workers: Number of workers of the saved run; those that held a replica between them count as one.
      saved_parts: Number of workers that held a replica between them.
      read: `(rank) -> arrays` of that worker's file.

    Returns:
      This worker's loss scale, or None to use the checkpoint's; and a line for the user, or an empty string.

    Raises:
      ConfigError: A worker's file does not fit this model and optimizer, or the run was saved within a round and has
        another division.
    """
    rounds.start()
    parts = rounds.parts
    if max(saved_parts, parts.workers) > 1:
        first = read(0)
        if saved_parts != parts.workers or first.get(_PREFIX + "division") != _division(rounds.model_variables):
            return None, _begin_divided_otherwise(rounds, saved_workers * saved_parts, saved_parts, first)

    def read_alike(worker: int) -> Arrays:
        """The file of the worker of a replica that has the same part as this one."""
        return read(worker * parts.workers + parts.part)

    if saved_workers == rounds.workers:
        own = _checked(rounds, read_alike(rounds.worker), rounds.worker)
        pending, weight, _ = own["round"].tolist()
        rounds.restore(own, same_workers=True)
        for variable, value in zip(rounds.kept, _group(own, "kept"), strict=True):
            rounds.assign_here(variable, value)
        if rounds.worker:
            for variable, value in zip(rounds.inner.variables, _group(own, "optimizer"), strict=True):
                rounds.assign_here(variable, value)
        if pending:
            rounds.resume_inner(_group(own, "inner"), round(pending), weight)
        scale = own.get("loss_scale")
        if scale is None:
            return None, ""
        return LossScale(tf.constant(scale[0], tf.float32), tf.constant(int(scale[1]), tf.int32)), ""
    return None, _end_for_all(rounds, saved_workers, read_alike)


def _begin_divided_otherwise(rounds: AnyRounds, workers: int, parts: int, first: Arrays) -> str:
    """Begins a round from what the checkpoint itself has."""
    row = first.get(_PREFIX + "round")
    if row is None:
        raise ConfigError("the checkpoint is of a run without local steps. Start in another workdir with --warm_start.")
    if row[0]:
        held = f", {parts} of which held a replica between them" if parts > 1 else ", each of which had whole replicas"
        raise ConfigError(
            f"the checkpoint was written within a round of {workers} workers{held}: their own weights fit only "
            "the same --mesh with as many of them for a replica. Resume with these, or start in another workdir with "
            "--warm_start."
        )
    rounds.restore({name.removeprefix(_PREFIX): array for name, array in first.items()}, same_workers=False)
    return "the model is divided in another way: all workers begin with the inner optimizer of the first replica"


def _division(variables: Sequence[keras.Variable]) -> int:
    """Returns a digest of how a replica divides the variables, the same on all its workers."""
    facts = []
    for variable in variables:
        held = held_by(variable)
        facts.append((shape_of(variable), held.ranks if held else (), held.split if held else split_of(variable)))
    return digest_of(facts)


def _end_for_all(rounds: AnyRounds, saved_workers: int, read: Callable[[int], Arrays]) -> str:
    """Ends the round in progress with the movements of all saved workers, and averages their inner optimizers.

    As at the end of any round, a worker that is not finite contributes nothing.
    """
    count = len(rounds.model_variables)
    landed = rounds.restore(_checked(rounds, read(0), 0), same_workers=False)
    own = rounds.own_share  # when a fragment arrives, a worker takes the rest, 1 - own, from the outer weights
    outer = [np.asarray(value_here(variable), np.float64) for variable in rounds.model_variables]
    slots = [*map(value_here, rounds.inner.variables)]
    moved, total, pending = [np.zeros_like(value) for value in outer], 0.0, 0.0
    sums, lost = [np.zeros(value.shape, np.float64) for value in slots], []
    for worker in range(saved_workers):
        arrays = _checked(rounds, read(worker), worker)
        pending, weight, _ = arrays["round"].tolist()
        inner, own_slots = _group(arrays, "inner"), _group(arrays, "optimizer") if worker else slots
        finite = all(np.isfinite(value).all() for value in (*inner, *own_slots))
        if not rounds.parts.of_replica(np.array([float(finite)])).all():
            lost.append(worker)
            continue
        if pending and weight:
            total += weight
            for place, (old, new) in enumerate(zip(outer, inner, strict=True)):
                moved[place] += weight * (old - new) * (own if place in landed else 1.0)
        for place, value in enumerate(own_slots):
            sums[place] += value
    if len(lost) == saved_workers:
        rounds.sets.mend(rounds.inner.variables)
    else:
        _assign_mean(rounds, sums, saved_workers - len(lost))
    names = f"worker{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
    without = f"left out {names} of {saved_workers}: not finite" if lost else ""
    if not total:
        return without
    weights = count - rounds.state_count
    mean = [(part / total).astype(np.float32) for part in moved]
    state = [(old - part).astype(np.float32) for old, part in zip(outer[weights:], mean[weights:], strict=True)]
    rounds.apply(mean[:weights], state)
    ended = f"ended the round of {saved_workers} workers, {round(pending)} steps long, where it was saved"
    return f"{ended}; {without}" if lost else ended


def _assign_mean(rounds: AnyRounds, sums: Sequence[np.ndarray], workers: int) -> None:
    """Assigns the mean of the inner optimizers of some workers."""
    for variable, summed in zip(rounds.inner.variables, sums, strict=True):
        if tf.as_dtype(variable.dtype).is_floating:  # not the step count, which is the same on all workers
            rounds.assign_here(variable, (summed / workers).astype(value_here(variable).dtype))


def _group(arrays: Arrays, name: str) -> list[np.ndarray]:
    numbers = sorted(int(key.removeprefix(f"{name}/")) for key in arrays if key.startswith(f"{name}/"))
    return [arrays[f"{name}/{number}"] for number in numbers]


def _checked(rounds: AnyRounds, saved: Arrays, worker: int) -> dict[str, np.ndarray]:
    """Returns a worker's arrays by their names without the prefix.

    Raises:
      ConfigError: They do not fit this model and optimizer.
    """
    arrays = {name.removeprefix(_PREFIX): array for name, array in saved.items() if is_local(name)}
    row = arrays.get("round")
    fits = row is not None and row.shape == (3,) and bool(np.isfinite(row).all())
    if fits and row is not None:
        expected = {"kept": rounds.kept}
        expected |= {"optimizer": rounds.inner.variables} if worker else {}
        expected |= {"inner": rounds.model_variables} if row[0] else {}
        fits = all(
            [value.shape for value in _group(arrays, name)] == [*map(shape_here, variables)]
            for name, variables in expected.items()
        )
    if not fits:
        raise ConfigError(
            f"the checkpoint does not fit these local steps: the file of worker {worker} is of another model or "
            "--optimizer. Resume with the previous ones, or start in another workdir with --warm_start."
        )
    return arrays
