"""Conversion between the variables of a run and the arrays of a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tfpar.checkpoint import checkpointer
from tfpar.checkpoint.arrays import Part, SavedArrays
from tfpar.checkpoint.keras_file import check_model_file
from tfpar.checkpoint.model_files import load_model
from tfpar.checkpoint.names import (
    averages_among,
    by_occurrence,
    matched,
    names_of,
    renamed,
    saved_names,
    without_counts,
)
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.optim import keras_calls, keras_rates
from tfpar.parallel.division import Shards, Split
from tfpar.parallel.held import held_by
from tfpar.parallel.split import (
    assign_parts,
    assign_whole,
    parts_here,
    peers_of,
    ranks_here,
    shape_of,
    split_of,
    whole,
    whole_here,
)
from tfpar.process.listing import listed

import keras
import numpy as np


def named(variables: Sequence[keras.Variable], prefix: str) -> dict[str, keras.Variable]:
    """Variables by `prefix/path`; a repeated path gets its position appended."""
    return {f"{prefix}/{name}": variable for name, variable in zip(names_of(variables), variables, strict=True)}


def snapshot(variables: Mapping[str, keras.Variable]) -> dict[str, np.ndarray]:
    """Copies of the variables' values by name; later steps do not touch them."""
    return {name: whole(variable) for name, variable in variables.items()}


def snapshot_here(
    variables: Mapping[str, keras.Variable], *, first: bool
) -> tuple[dict[str, np.ndarray], dict[str, Part]]:
    """Copies of this worker's parts of variables that several workers share. Sends nothing.

    Args:
      variables: By name.
      first: Whether this is the first of these workers, which also saves the variables that all of them have.

    Returns:
      Values by name, and which of them are parts of a variable.
    """
    arrays: dict[str, np.ndarray] = {}
    parts: dict[str, Part] = {}
    for name, variable in variables.items():
        split, held = split_of(variable), held_by(variable)
        if not (held.saved_here if held else first or peers_of(variable)):
            continue
        if split and peers_of(variable):
            own = {rank: part for rank, part in parts_here(variable).items() if part.size}
            if own:  # otherwise there is only padding here, or what other devices save
                arrays[name], parts[name] = _united(variable, split, own)
        else:
            arrays[name] = whole_here(variable)
    return arrays, parts


def restore(
    variables: Mapping[str, keras.Variable], arrays: Mapping[str, np.ndarray], order: Sequence[str] = ()
) -> None:
    """Assigns saved values, all or none. From `SavedArrays`, reads only the parts that this worker has.

    Args:
      variables: By name, in order.
      arrays: Saved values by name.
      order: The names in the order they were saved in. Keras counts names over a whole process (`dense`, `dense_1`),
        so a second model of one program has different names; if names differ only in such counts, the order identifies
        them.

    Raises:
      ConfigError: Names or shapes that do not match, listing them.
    """
    names = names_in(arrays, variables, order)
    problems = [f"missing {name}" for name in variables if name not in names]
    problems += [f"unexpected {name}" for name in set(arrays) - set(names.values())]
    problems += [
        f"{name}: saved {saved_shape}, model has {shape_of(variable)}"
        for name, variable in variables.items()
        if name in names and (saved_shape := _shape_in(arrays, names[name])) != shape_of(variable)
    ]
    if problems:
        shown = listed(problems, separator="; ")
        frozen = all(problem.split()[1].startswith("optimizer/") for problem in problems)
        if frozen:
            remedy = (
                "Were layers frozen or unfrozen since it was written? Then continue training in another workdir; "
                "warm_start=WORKDIR loads the weights."
            )
        else:
            remedy = "Build them as they were when it was written, or begin in another workdir."
        raise ConfigError(f"the checkpoint does not fit this model and optimizer: {shown}. {remedy}")
    for name, variable in variables.items():
        _restore(variable, arrays, names[name])


def files_to_read(variables: Mapping[str, keras.Variable], arrays: SavedArrays) -> set[str]:
    """The files that `restore` reads on this worker, except for variables whose names have changed.

    Args:
      variables: By name.
      arrays: The saved arrays.
    """
    names = names_in(arrays, variables)
    files: set[str] = set()
    for name, variable in variables.items():
        held = held_by(variable)
        if name in names and (held is None or held.here):
            split = split_of(variable)
            wanted = [_part(variable, split, rank) for rank in {*ranks_here(variable)}] if split else [None]
            files.update(file for part in wanted for file in arrays.files_of(names[name], part))
    return files


def names_in(
    arrays: Mapping[str, np.ndarray], variables: Mapping[str, keras.Variable], order: Sequence[str] = ()
) -> dict[str, str]:
    """The saved names of those variables that were saved; arguments as for `restore`."""
    if set(variables) != set(arrays) and [*map(without_counts, variables)] == [*map(without_counts, order)]:
        return dict(zip(variables, order, strict=True))
    return saved_names(variables, arrays)


def _shape_in(arrays: Mapping[str, np.ndarray], name: str) -> tuple[int, ...]:
    return arrays.shape(name) if isinstance(arrays, SavedArrays) else arrays[name].shape


def _restore(variable: keras.Variable, arrays: Mapping[str, np.ndarray], name: str) -> None:
    """Assigns a saved value, or the parts of it that this worker has."""
    split = split_of(variable)
    if split and isinstance(arrays, SavedArrays):
        shape = tuple(variable.shape)
        assign_parts(
            variable,
            lambda rank: split.with_padding(arrays.read(name, _part(variable, split, rank or 0)), shape),
        )
    elif (held := held_by(variable)) is None or held.here:
        assign_whole(variable, arrays[name])


def _part(variable: keras.Variable, split: Split | Shards, rank: int) -> Part:
    """The part of a divided variable with this rank."""
    shape = shape_of(variable)
    return Part(shape, split.ranges(shape, rank))


def _united(variable: keras.Variable, split: Split | Shards, own: Mapping[int, np.ndarray]) -> tuple[np.ndarray, Part]:
    """The parts of a worker's devices, by rank, as one part."""
    pieces = {rank: _part(variable, split, rank) for rank in own}
    axes = next(iter(pieces.values())).ranges
    united = Part(
        shape_of(variable),
        {axis: tuple(dict.fromkeys(each for piece in pieces.values() for each in piece.ranges[axis])) for axis in axes},
    )
    array = np.empty(united.part_shape, next(iter(own.values())).dtype)
    for rank, piece in pieces.items():
        for there, here in piece.common(united):
            array[here] = own[rank][there]
    return array, united


def checked(run: Mapping[str, Any], *, synchronous: bool) -> Mapping[str, Any]:
    """The run state of a checkpoint, checked to have everything that a run needs to continue.

    Args:
      run: As saved.
      synchronous: Whether the run that resumes is synchronous.

    Raises:
      ConfigError: Something is missing or has another type; a synchronous run resumes as an asynchronous one, in which
        a step is the work of a single worker, or vice versa.
    """
    if isinstance(run.get("loss_scale"), dict) is not synchronous and "variables" in run:
        was, now = ("an asynchronous", "a synchronous") if synchronous else ("a synchronous", "an asynchronous")
        raise ConfigError(
            f"--strategy: the checkpoint is of {was} run, and {now} run counts steps differently. Resume with the "
            "previous --strategy, or start in another --workdir with --warm_start."
        )
    number = (int, float)
    wanted: dict[str, Any] = {"variables": list, "input": dict, "skipped": int, "best": (*number, type(None))}
    if synchronous:
        wanted |= {"loss": list, "workers": int, "plateau": (dict, type(None))}
    wrong = [name for name, kind in wanted.items() if name not in run or not isinstance(run[name], kind)]
    if not wrong:
        parts: dict[str, Any] = {"input.fingerprint": (run["input"].get("fingerprint"), str)}
        if synchronous:
            scale = run["loss_scale"]
            parts["loss_scale.scale"] = (scale.get("scale"), number)
            parts["loss_scale.good_steps"] = (scale.get("good_steps"), int)
            parts["loss"] = (run["loss"][1] if len(run["loss"]) == 2 else None, number)
        wrong = [name for name, (value, kind) in parts.items() if not isinstance(value, kind)]
    if wrong:
        raise ConfigError(
            f"the checkpoint's manifest has no valid {', '.join(wrong)}: another version or another program wrote it. "
            "Start in another --workdir; --warm_start loads the weights."
        )
    return run


def check_data(run: Mapping[str, Any], fingerprint: str, config: ExperimentConfig) -> None:
    """Refuses to continue a run on other examples.

    Raises:
      ConfigError: The fingerprint of the data set is not the saved one.
    """
    if run["input"]["fingerprint"] != fingerprint:
        raise ConfigError(
            f"--dataset={config.input.dataset}: the data set is not the one the run in {config.checkpoint.workdir} was "
            "trained on (number, shape or files of its examples differ, or values or weights of arrays, those of "
            "class_weight included, or the labels that a loss ignores). Restore it, or use another --workdir."
        )


def optimizer_options(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """The options of an optimizer object that JSON can hold, without its name, which Keras numbers."""
    config = keras_rates.config_of(optimizer)
    if callable(rate := config.get("learning_rate")):
        config["learning_rate"] = keras_rates.schedule_config(rate) or rate
    options = {}
    for name, value in config.items():
        with contextlib.suppress(TypeError, ValueError):
            options[name] = json.loads(json.dumps(value))
    options.pop("name", None)
    return options


def check_optimizer(run: Mapping[str, Any], options: Mapping[str, Any], workdir: str) -> None:
    """Refuses to continue a run with an optimizer object of other options, which would mix saved and new ones.

    Args:
      run: The run state of the checkpoint.
      options: From `optimizer_options`; empty for an optimizer given by name.
      workdir: For the message.

    Raises:
      ConfigError: Lists the differences.
    """
    saved = run.get("optimizer_options") or {}
    differ = [name for name in options if name in saved and saved[name] != options[name]]
    if differ:
        shown = ", ".join(f"{name} {saved[name]} -> {options[name]}" for name in differ)
        raise ConfigError(
            f"optimizer: the run in {workdir} has another one ({shown}). Resume with the same optimizer, or start in "
            "another workdir with warm_start."
        )


def check_warm_start(source: str) -> None:
    """Refuses a path where there are no weights, before anything is started.

    Raises:
      ConfigError: No run, no checkpoint and no `.keras` file there, or they may not be read.
    """
    if _is_model_file(source):
        check_model_file(source, flag="--warm_start")
        return
    try:
        found = checkpointer.is_checkpoint(source) or checkpointer.has_any(source)
    except checkpointer.CheckpointError as error:
        raise ConfigError(f"--warm_start={source}: {error}") from error
    if not found:
        raise _no_weights(source)


def _is_model_file(source: str) -> bool:
    # `Path.is_file` raises an error within a directory that may not be searched (Python 3.11).
    return os.path.isfile(source) and pathlib.PurePath(source).suffix == ".keras"


def _no_weights(source: str) -> ConfigError:
    return ConfigError(
        f"--warm_start={source}: no checkpoint and no .keras file there. Give a run's workdir, one of its "
        "checkpoints/step-* directories, or a model.keras."
    )


def warm_start(model: keras.Model, source: str, say: Callable[[str], None]) -> None:
    """Copies the matching weights from another run, a checkpoint directory or a `.keras` file.

    Weights are matched by path, as `names.matched` says. A weight of another shape, such as a head for other classes,
    keeps its initial value and is named.

    Args:
      model: A built model.
      source: A workdir, a checkpoint directory, or a `.keras` file.
      say: Called with one line on the copied weights.

    Raises:
      ConfigError: There are no weights, or none fits.
    """
    values = _weights_of(source, say)
    own = by_occurrence(dict(zip(names_of(model.weights), model.weights, strict=True)))
    adapters = [path for path in values if "/lora_" in path and path not in own]
    if adapters:
        raise ConfigError(
            f"--warm_start={source} has adapters that this model lacks ({', '.join(adapters[:2])}, ...), and its "
            "weights are incomplete without them. Give its model.keras, in which they are merged, or the same --lora."
        )
    sources = matched(own, values)
    fitting = {path: name for path, name in sources.items() if values[name].shape == shape_of(own[path])}
    if not fitting:
        raise ConfigError(
            f"--warm_start={source}: none of its {len(values)} weights has the name and shape of one of the model's "
            f"{len(own)}. Name a run of such a model, or build the model of that run (--model, --model_args)."
        )
    for path, name in fitting.items():
        assign_whole(own[path], values[name])
    keras_calls.finalize_states(model)
    kept = sorted(set(own) - set(fitting))
    others = renamed(fitting)
    say(
        f"warm start from {source}: {len(fitting)} of {len(own)} weights taken"
        + (f", also under other names: {', '.join(others[:6])}{' ...' if len(others) > 6 else ''}" if others else "")
        + (f"; keeping their initial values: {', '.join(kept[:6])}{' ...' if len(kept) > 6 else ''}" if kept else "")
    )


def _weights_of(source: str, say: Callable[[str], None]) -> dict[str, np.ndarray]:
    path = pathlib.Path(source)
    if _is_model_file(source):
        loaded = load_model(source, flag="--warm_start")
        return by_occurrence(
            {name: each.numpy() for name, each in zip(names_of(loaded.weights), loaded.weights, strict=True)}
        )
    try:
        checkpoint = checkpointer.read(path) if checkpointer.is_checkpoint(path) else checkpointer.find(path, warn=say)
    except checkpointer.CheckpointError as error:
        raise ConfigError(f"--warm_start={source}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"--warm_start={source} is damaged ({error}). Name an older checkpoint directory.") from error
    if checkpoint is None:
        raise _no_weights(source)
    order = [name for name in checkpoint.run.get("variables", ()) if name in checkpoint.arrays] or checkpoint.arrays
    keeps_averages = checkpoint.config.get("ema") or (checkpoint.run.get("optimizer_options") or {}).get("use_ema")
    averages = averages_among(dict.fromkeys([*order, *checkpoint.arrays])) if keeps_averages and checkpoint.step else {}
    if averages:
        say(f"warm start from {source}: taking the moving averages of {len(averages)} weights, as evaluation did there")
    names = [name for name in order if name.startswith("model/")]
    return by_occurrence({name.removeprefix("model/"): checkpoint.arrays[averages.get(name, name)] for name in names})


def params_sha256(variables: Sequence[Any]) -> str:
    """SHA-256 over the float32 bytes of the trainable weights in path order.

    Args:
      variables: The trainable variables (anything with `path` and `numpy()`).
    """
    return sha256_of_blocks((variable.path, [variable.numpy()]) for variable in variables)


def sha256_of_blocks(weights: Iterable[tuple[str, Iterable[np.ndarray]]]) -> str:
    """`params_sha256` of weights that are given as pairs of a path and blocks of their elements in order."""
    digest = hashlib.sha256()
    for _, blocks in sorted(weights, key=lambda weight: weight[0]):
        for block in blocks:
            digest.update(np.ascontiguousarray(block, dtype="<f4").reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
