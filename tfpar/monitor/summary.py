"""The results of a run: `summary.json`, `model.keras` and the closing table."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.checkpoint import run_state
from tfpar.checkpoint.checkpointer import CheckpointError
from tfpar.checkpoint.export import export_model, in_one_line
from tfpar.monitor import tags
from tfpar.monitor.monitor import Monitor
from tfpar.monitor.run_info import RunInfo, RunOutcome, stopping_option
from tfpar.parallel.split import whole_blocks, whole_elements
from tfpar.process.whole_files import replace_file

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

SUMMARY, MODEL = RESULTS = ("summary.json", "model.keras")


def replica_digests(strategy: tf.distribute.Strategy, weights: Sequence[keras.Variable]) -> list[str]:
    """`params_sha256` of every replica of this process; where weights are divided, of every device, with the wholes.

    Args:
      strategy: The strategy that the weights were created under.
      weights: The trainable weights.
    """
    return [
        run_state.sha256_of_blocks((weight.path, whole_blocks(weight, copy)) for weight in weights)
        for copy in range(_copies(strategy, weights))
    ]


def weight_digests(strategy: tf.distribute.Strategy, weights: Sequence[keras.Variable]) -> list[list[str]]:
    """SHA-256 of each weight, in order, for every replica of this process, as in `replica_digests`.

    Args:
      strategy: The strategy that the weights were created under.
      weights: The trainable weights.
    """
    return [
        [run_state.sha256_of_blocks([(weight.path, whole_blocks(weight, copy))]) for weight in weights]
        for copy in range(_copies(strategy, weights))
    ]


def _copies(strategy: tf.distribute.Strategy, weights: Sequence[keras.Variable]) -> int:
    return len(strategy.experimental_local_results(weights[0].value)) if weights else 0


def summary(info: RunInfo, outcome: RunOutcome, monitor: Monitor, params_sha256: str) -> dict[str, Any]:
    """The contents of `summary.json`, a stable format for scripts (docs/outputs.md)."""
    topology, traffic = info.topology, outcome.traffic
    return {
        "steps": outcome.steps,
        "train_loss": outcome.train_loss,
        "stopped_by": outcome.stopped_by or None,
        "eval": {name: _plain(value) for name, value in outcome.results.items() if name != "examples"},
        **monitor.statistics(),
        "strategy": topology.name,
        "workers": topology.workers,
        "transport": topology.transport if topology.workers > 1 and topology.synchronous else None,
        "replicas": topology.replicas,
        "precision": info.config.precision.precision,
        "jit_compile": info.jit_compile,
        "compiles_update": info.compiles_update,
        "jit_segments": info.jit_segments,
        "exchange": {
            "codec": traffic.codec,
            "pattern": traffic.pattern,
            "payload_bytes_per_step": traffic.payload_bytes,
            "wire_bytes_per_step": traffic.wire_bytes,
            "dense_wire_bytes_per_step": traffic.dense_bytes,
            "model_axis_bytes_per_step": traffic.model_axis_bytes,
        },
        "rounds": outcome.rounds,
        "local_steps": outcome.local_steps,
        "params_sha256": params_sha256,
        "restarts": outcome.restarts,
        "steps_redone": outcome.steps_redone,
        "skipped_steps": outcome.skipped_steps,
        "skipped_examples": outcome.skipped_examples,
        "skipped_validation_examples": _skipped_validation_examples(info, outcome),
        "failed_checkpoints": [*outcome.failed_checkpoints],
        "failed_writes": [*monitor.failures],
        "parameters": whole_elements(info.model.weights),
        "trainable_parameters": whole_elements(info.model.trainable_weights),
        **outcome.own,
    }


def _plain(value: Any) -> Any:
    """A metric's value as JSON has it: an array as lists."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _skipped_validation_examples(info: RunInfo, outcome: RunOutcome) -> int:
    """How many examples the last evaluation left out."""
    if info.validation is None or "examples" not in outcome.results:
        return 0
    return info.config.evaluated(info.validation.info.num_examples) - round(outcome.results["examples"])


def write(
    info: RunInfo, content: dict[str, Any], monitor: Monitor, eval_weights: Callable[[], Sequence[keras.Variable]]
) -> None:
    """Writes `model.keras` and `summary.json` on the chief, each whole or not at all, and prints the closing table.

    What cannot be written is reported, and the results are printed whatever happens.

    Args:
      info: The run.
      content: From `summary`.
      monitor: The run's monitor.
      eval_weights: Gives the trainable weights that evaluation used, in order.

    Raises:
      CheckpointError: Something could not be written, and `on_checkpoint_error` is `fail`.
    """
    options = info.config.checkpoint
    if info.topology.is_chief:
        monitor.finish(content)
    unsaved: list[str] = []
    # Workers that share a replica have its weights only together.
    if options.workdir and (info.topology.is_chief or info.topology.parts_on_workers):
        path = pathlib.Path(options.workdir) / MODEL if info.topology.is_chief else None
        unsaved = _try_write(MODEL, lambda: export_model(info.model, eval_weights(), path))
    if not info.topology.is_chief:
        return
    failed = content["failed_writes"] = [*monitor.failures, *unsaved]
    if options.workdir:
        path = pathlib.Path(options.workdir)
        problem = _try_write(SUMMARY, lambda: _write_summary(path, content))
        if problem:
            failed += problem
            monitor.message(f"what summary.json would hold: {json.dumps(_finite(content))}")
    monitor.message(closing_table(content, options.workdir))
    if options.on_checkpoint_error == "fail" and failed:
        raise CheckpointError(
            f"--workdir={options.workdir}: not everything could be written ({'; '.join(failed)}), and "
            "--on_checkpoint_error=fail makes that an error. The results are above."
        )


def _try_write(name: str, write: Callable[[], None]) -> list[str]:
    """Writes; returns one line that describes the error of the disk, or of a model that Keras cannot save, if there
    was one."""
    try:
        write()
    except Exception as error:
        if _is_disk_error(error):
            return [f"{name}: {error}"]
        if name != MODEL or isinstance(error, tf.errors.OpError):
            raise
        return [f"{name}: {in_one_line(error)}"]
    return []


def _is_disk_error(error: BaseException | None) -> bool:
    """Whether an error comes from the file system; zipfile and h5py wrap some of these in other types."""
    while error is not None:
        if isinstance(error, OSError) or "errno = " in str(error):
            return True
        error = error.__context__
    return False


def _write_summary(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    replace_file(path / SUMMARY, (json.dumps(_finite(content), indent=2) + "\n").encode())


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_summary(workdir: str) -> dict[str, Any] | None:
    """The `summary.json` of a workdir, or None where there is none that can be read."""
    try:
        content = json.loads((pathlib.Path(workdir) / "summary.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def previous_summary(workdir: str, step: int) -> dict[str, Any] | None:
    """The results that an earlier start left of the very step where this one stands, or None.

    A summary of another step is a shorter run's, which this one has passed.

    Args:
      workdir: Of the run; empty if it has none.
      step: Steps done.
    """
    content = read_summary(workdir) if workdir else None
    return content if content is not None and content.get("steps") == step else None


def report_already_finished(
    info: RunInfo, content: dict[str, Any], monitor: Monitor, eval_weights: Callable[[], Sequence[keras.Variable]]
) -> dict[str, Any]:
    """Prints that there is nothing left to do, and its results; writes a `model.keras` that has gone missing or could
    not be written, in place of which there may be that of a shorter run.

    Args:
      info: The run.
      content: From `previous_summary`.
      monitor: The run's monitor.
      eval_weights: Gives the trainable weights that evaluation used, in order.

    Returns:
      The contents of `summary.json` afterwards.
    """
    workdir, step = info.config.checkpoint.workdir, content["steps"]
    if step < info.total:
        by = content.get("stopped_by") or "a hook or callback"
        option, _ = stopping_option(by, info.config)
        off = f", or --{option}=false," if option else ""
        monitor.message(f"{by} stopped this run at step {step} of {info.total}; more --{info.length}{off} continue it")
    else:
        monitor.message(f"this run is finished (step {step} of {info.total}); more --{info.length} would continue it")
    path = pathlib.Path(workdir) / MODEL
    alone = info.topology.is_chief and not info.topology.parts_on_workers
    if alone and (unwritten(content, MODEL) or not path.exists()):
        problems = _try_write(MODEL, lambda: export_model(info.model, eval_weights(), path))
        _replace_failures(content, problems, path.parent)
        for problem in problems:
            monitor.message(f"could not be written: {problem}", logging.WARNING)
    # A version that wrote less, or somebody who has edited the file.
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        monitor.message(closing_table(content, workdir))
    return content


def unwritten(content: Mapping[str, Any], name: str) -> str:
    """The line of a summary about a file that could not be written; empty if it was."""
    return next((line for line in _failed_writes(content) if line.startswith(f"{name}: ")), "")


def _failed_writes(content: Mapping[str, Any]) -> list[str]:
    """The lines of a summary about what could not be written, of which anything may be left in an edited file."""
    lines = content.get("failed_writes")
    return [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []


def _replace_failures(content: dict[str, Any], problems: list[str], workdir: pathlib.Path) -> None:
    """Corrects a summary after another attempt to write `model.keras`."""
    before = content.get("failed_writes")
    kept = [line for line in _failed_writes(content) if not line.startswith(f"{MODEL}: ")]
    content["failed_writes"] = [*kept, *problems]
    if before is not None and content["failed_writes"] != before:
        _try_write(SUMMARY, lambda: _write_summary(workdir, content))


def closing_table(content: dict[str, Any], workdir: str) -> str:
    """A short table of the results and where to look next."""
    rows = [("steps", f"{content['steps']}"), ("train loss", _number(content["train_loss"]))]
    rows += [(f"eval {name}", f"{value:.4f}") for name, value in tags.by_element(content["eval"]).items()]
    if content["examples_per_second"] is None:
        rows.append(("speed", "not measured: the steps were one call, which compiles"))
    else:
        rows += [
            next(
                ((pace, f"{content[name]:.0f}") for pace, name in tags.PACES.items() if name in content),
                ("examples/s", f"{content['examples_per_second']:.0f}"),
            ),
            ("step ms (p50 / p95)", f"{content['step_ms_p50']:.2f} / {content['step_ms_p95']:.2f}"),
            ("input wait", f"{100 * content['input_wait_fraction']:.1f} %"),
        ]
    exchange = content["exchange"]
    rows.append(("layout", f"{content['strategy']}, workers: {content['workers']}, replicas: {content['replicas']}"))
    if content["replicas"] > 1:  # else nothing travels
        sent = f"{exchange['wire_bytes_per_step'] / 1e6:.3f} MB sent per step and sender"
        rows.append(("exchange", f"{exchange['codec']}, {sent}"))
    if within := exchange["model_axis_bytes_per_step"]:
        rows.append(("model axis", f"{within / 1e6:.3f} MB sent per step and device"))
    if content.get("rounds") is not None:
        federated = content.get("federated")
        what = (
            f"with {federated['clients_trained']} clients" if federated else f"of {content['local_steps']} local steps"
        )
        rows.append(("rounds", f"{content['rounds']}, {what}"))
        if federated and federated["epsilon"] is not None:
            rows.append(("privacy", f"epsilon {federated['epsilon']:.4g} with delta {federated['delta']:.2g}"))
    saved = exchange["dense_wire_bytes_per_step"] - exchange["wire_bytes_per_step"]
    if saved > 0:
        share = saved / exchange["dense_wire_bytes_per_step"]
        rows.append(("saved on the wire", f"{saved * content['steps'] / 1e6:.1f} MB per sender, {share:.0%} of dense"))
    if content["skipped_steps"]:
        every = content["skipped_steps"] == content["steps"]
        rows.append(("skipped (non-finite)", f"{content['skipped_steps']}{': every step' if every else ''}"))
    if content["restarts"]:
        rows.append(("restarts", f"{content['restarts']}, {content['steps_redone']} steps done again"))
    skipped = {"training": content["skipped_examples"], "validation": content["skipped_validation_examples"]}
    if any(skipped.values()):
        texts = [f"{count} in {what}" for what, count in skipped.items() if count]
        rows.append(("skipped examples", f"{', '.join(texts)} (--on_bad_record=skip)"))
    if content["failed_checkpoints"]:
        first, *more = content["failed_checkpoints"]
        rows.append(("failed checkpoints", first + (f"; and {len(more)} more, last {more[-1]}" if more else "")))
    if content["failed_writes"]:
        rows.append(("failed to write", "; ".join(content["failed_writes"])))
    width = max(len(name) for name, _ in rows)
    lines = ["", "result", *[f"  {name:<{width}}  {value}" for name, value in rows]]
    lines += ["", "look next"]
    if workdir:
        there = [f"{workdir}/{name}" for name in RESULTS if os.path.exists(os.path.join(workdir, name))]
        lines += [f"  {command_of('tensorboard')} --logdir {shlex.quote(workdir)}"]
        lines += [f"  {', '.join(there)}"] if there else []
    else:
        lines += ["  nothing was kept; --workdir=DIR keeps checkpoints, TensorBoard events and model.keras"]
    return "\n".join(lines)


def command_of(name: str) -> str:
    """A program of this environment as it can be typed in a shell here, also where the environment is not active."""
    beside = os.path.join(os.path.dirname(sys.executable), name)
    if not os.path.exists(beside) or shutil.which(name) == beside:
        return name
    return shlex.quote(os.path.relpath(beside) if beside.startswith(os.getcwd() + os.sep) else beside)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
