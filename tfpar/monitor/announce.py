"""The output before a run starts and when it ends."""

from __future__ import annotations

import logging
import pathlib

from tfpar import models
from tfpar.checkpoint import format as checkpoint_format
from tfpar.checkpoint.export import why_not_saved
from tfpar.checkpoint.format import CheckpointError
from tfpar.config import ConfigError
from tfpar.config.sections.outer import AUTO
from tfpar.exchange import Traffic
from tfpar.monitor import samples
from tfpar.monitor.monitor import Monitor
from tfpar.monitor.run_info import RunInfo, RunOutcome
from tfpar.parallel.split import whole_elements
from tfpar.parallel.topology import Topology


def build_monitor(info: RunInfo) -> Monitor:
    """The monitor of a run, with the model's cost for its MFU figure.

    Reinforcement learning has no such figure: beside training, its steps act in environments, estimate values and
    compute targets, with FLOPs that are not those of a trained example.
    """
    cost = None if info.config.reinforcement else info.model_summary
    is_chief = info.topology.is_chief
    return Monitor(
        info.config.checkpoint.workdir or None,
        is_chief=is_chief,
        config=info.config,
        total_steps=info.total,
        flops_per_example=cost.training_flops_per_example if cost else None,
        peak_flops=peak_flops_of_replica(info.topology, info.config.precision.precision) if cost and is_chief else None,
        replicas=info.topology.replicas,
        worker=max(info.topology.worker, 0),
        workers=info.topology.workers,
        metric_results=info.metric_results,
        line=info.line,
    )


def peak_flops_of_replica(topology: Topology, precision: str) -> float:
    """Operations per second that one replica could do at best.

    Args:
      topology: The workers, replicas and devices of the run.
      precision: See `models.peak_flops`.
    """
    # Logical devices share the cores of their host, with each other and with all workers that run on it.
    replicas = topology.local_replicas
    if topology.cluster is not None:
        workers = [task for job, tasks in topology.cluster.cluster.items() if job == "worker" for task in tasks]
        workers += topology.cluster.cluster.get("chief", ()) if topology.synchronous else ()
        host = topology.cluster.address.rpartition(":")[0]
        replicas *= max(1, sum(task.rpartition(":")[0] == host for task in workers))
    peak = models.peak_flops(precision)
    # A replica may span several devices. Those of a worker have its threads between them, if they are no accelerators.
    parts = topology.replica_workers if peak.threads else topology.mesh.devices_of_replica
    return parts * peak.of_replica(replicas)


def announce(info: RunInfo, monitor: Monitor, traffic: Traffic) -> None:
    """Prints model, input and exchange before step 1.

    Args:
      info: The run.
      monitor: Its monitor.
      traffic: What one step costs on the wire.
    """
    if not info.topology.is_chief:
        return
    exchange_text = f"{_rounds_text(info)}exchange {info.exchange.describe()}: "
    exchange_text += _bytes_text(traffic) if info.topology.replicas > 1 else "one replica, nothing travels"
    step_text = f"step: {info.config.precision.precision}, XLA {_compiled_text(info)}"
    if info.xla_disabled_reason:
        step_text += f" ({info.xla_disabled_reason})"
    kept = "" if info.config.checkpoint.workdir else ("no --workdir: nothing of this run will be kept")
    for text in (_model_text(info), _input_text(info), info.exchange.plan_table, exchange_text, step_text, kept):
        if text:
            monitor.message(text)
    warn_of_counted_padding(info, monitor)


def check_saving(info: RunInfo, monitor: Monitor) -> None:
    """Says before the first step, on the chief, if Keras will not be able to write `model.keras`; all workers call it.

    Raises:
      ConfigError: It will not be, and `--on_checkpoint_error` is `fail`.
    """
    options = info.config.checkpoint
    fails = options.on_checkpoint_error == "fail"
    reason = why_not_saved(info.model) if options.workdir and (fails or info.topology.is_chief) else ""
    if not reason:
        return
    text = f"Keras cannot save this model ({reason}), so that there will be no model.keras"
    if fails:
        raise ConfigError(
            f"--on_checkpoint_error=fail: {text}. Give the layer a get_config(), or use --on_checkpoint_error=warn."
        )
    monitor.message(f"{text}. Checkpoints are written. Give the layer a get_config().", logging.WARNING)


def _compiled_text(info: RunInfo) -> str:
    if info.topology.device_type == "TPU":
        return "on"
    if info.jit_compile:
        return "on" if info.compiles_update else "on, except for the optimizer step"
    return "in the optimizer step alone" if info.compiles_update else "off"


def _rounds_text(info: RunInfo) -> str:
    outer = info.config.outer
    if not outer.uses_rounds:
        return ""
    steps = "1 local step" if outer.local_steps == 1 else f"{outer.local_steps} local steps"
    steps = "a measured number of local steps" if outer.local_steps == AUTO else steps
    steps = f"{outer.round_seconds:g} s" if outer.round_seconds else steps
    text = f"rounds of {steps}, {outer.optimizer} ({outer.learning_rate:g}, momentum {outer.momentum:g})"
    if outer.streams:
        fragments = f"{outer.outer_fragments} fragments" if outer.outer_fragments > 1 else "the whole model"
        text += f", {fragments} applied after {outer.delay} steps, own share {outer.own_share:g}"
    return f"{text}; "


def warn_of_counted_padding(info: RunInfo, monitor: Monitor) -> None:
    """Warns where Keras' batch normalisation, or a loss that the model adds itself, takes padding for examples."""
    adding, counting = info.counting_padding
    if adding:
        monitor.message(
            f"a loss that the model adds itself ({adding[0]}{' ...' * (len(adding) > 1)}: add_loss or "
            "activity_regularizer) includes the padding of incomplete batches. --remainder=drop leaves an incomplete "
            "batch out of training; a --global_batch_size (and --eval_batch_size) that divides the examples needs no "
            "padding.",
            logging.WARNING,
        )
    if counting:
        monitor.message(
            f"keras.layers.BatchNormalization ({counting[0]}{' ...' * (len(counting) > 1)}) counts the padding of "
            "incomplete batches as examples. tfpar.models.BatchNormalization does not (same arguments); or use "
            "--remainder=drop.",
            logging.WARNING,
        )


def record_run_info(info: RunInfo, monitor: Monitor, traffic: Traffic, step: int) -> None:
    """Records options, model, input, exchange and sample inputs, once it is known that there is something to train.

    Args:
      info: The run.
      monitor: Its monitor.
      traffic: What one step costs on the wire.
      step: Finished steps.
    """
    if not info.topology.is_chief:
        return
    monitor.begin(step)
    record_exchange(info, monitor, traffic, step)
    monitor.text("model", _model_text(info))
    monitor.text("input", _input_text(info))
    samples.write_inputs(monitor, info.train)


def record_exchange(info: RunInfo, monitor: Monitor, traffic: Traffic, step: int) -> None:
    """Records the facts about the exchange that do not change from step to step; call it again after retuning."""
    if info.topology.replicas == 1:
        return
    values = {
        "exchange": info.exchange.describe(),
        "codec": traffic.codec,
        "pattern": traffic.pattern,
        "payload, bytes per step": f"{traffic.payload_bytes:,}",
        "sent by each, bytes per step": f"{traffic.wire_bytes:,}",
        "without a codec, bytes per step": f"{traffic.dense_bytes:,}",
    }
    if traffic.wire_bytes:
        values["compression ratio"] = f"{traffic.dense_bytes / traffic.wire_bytes:.2f}"
    monitor.table("exchange", values, step=step)
    if info.exchange.plan_table:
        monitor.text("exchange_plan", info.exchange.plan_table, step=step)


def _input_text(info: RunInfo) -> str:
    return info.pipeline.report(asynchronous=not info.topology.synchronous)


def _model_text(info: RunInfo) -> str:
    if info.model_summary is None:
        return f"{info.model.name}: {whole_elements(info.model.weights):,} parameters, cost unknown before it runs"
    return models.format_summary(info.model_summary, info.model.name)


def _bytes_text(traffic: Traffic) -> str:
    text = f"{traffic.payload_bytes / 1e6:.3f} MB a step, {traffic.wire_bytes / 1e6:.3f} MB sent by each"
    if traffic.dense_bytes > traffic.wire_bytes:
        text += f", dense {traffic.dense_bytes / 1e6:.3f} MB ({traffic.dense_bytes / traffic.wire_bytes:.1f}x)"
    return text


def warn_of_skipped(outcome: RunOutcome, monitor: Monitor, bad_weights: str) -> None:
    """Warns that a run, or its end, changed no weight.

    Args:
      outcome: The run.
      monitor: Its monitor.
      bad_weights: Names the weights that are not finite, see `NonFiniteStreak.bad_weights`; empty if all are.
    """
    if outcome.train_loss is not None and not bad_weights:
        return
    if not outcome.skipped_steps:
        if outcome.skipped_examples:
            monitor.message(
                f"the last epoch had no example that can be used ({outcome.skipped_examples} were left out in all): "
                "the model has learned nothing from it. Repair the data, or give others.",
                logging.WARNING,
            )
        return
    causes = (
        "Likely causes: NaN or infinity in the inputs, labels outside the model's outputs, a --learning_rate that is "
        "too high (lower it, or give --clip_norm), overflow in --precision=mixed_float16."
    )
    which = f"all {outcome.steps} steps" if outcome.skipped_steps == outcome.steps else "the last steps"
    monitor.message(
        f"{which} were skipped because loss or gradients were not finite: the model has learned nothing from "
        f"them. {bad_weights or causes}",
        logging.WARNING,
    )


def report_stopped(info: RunInfo, monitor: Monitor, step: int, *, preempted: bool) -> None:
    """Prints after which step an unfinished run stopped, and from which checkpoint it can resume.

    Call it once the last checkpoint is written.

    Args:
      info: The run.
      monitor: Its monitor.
      step: Steps done.
      preempted: Whether the process was asked to end.
    """
    reason = "asked to end (SIGTERM): " if preempted else ""
    hint = _resume_hint(info.config.checkpoint.workdir, step)
    monitor.message(f"{reason}stopped after step {step} of {info.total}; {hint}")


def report_interrupted(info: RunInfo, monitor: Monitor) -> None:
    """Prints from which checkpoint a run can resume that Ctrl-C has ended."""
    workdir = info.config.checkpoint.workdir
    newest = _newest(workdir) if workdir else None
    if isinstance(newest, CheckpointError):
        hint = str(newest)
    elif newest is not None:
        hint = f"the newest checkpoint is of step {newest}; run the same command again to resume there"
    elif workdir:
        hint = "there is no checkpoint yet, so another start begins at step 0"
    else:
        hint = "without a workdir nothing is kept"
    monitor.message(f"interrupted (Ctrl-C): {hint}")


def _resume_hint(workdir: str, step: int) -> str:
    """What another start would find."""
    if not workdir:
        return "without --workdir nothing is kept, so another start begins at step 0"
    newest = _newest(workdir)
    if isinstance(newest, CheckpointError):
        return str(newest)
    if newest is None:
        return "no checkpoint could be saved, so another start begins at step 0"
    failed = "" if newest >= step else f"step {step} could not be saved, "
    return f"{failed}the newest checkpoint is of step {newest}; start again to resume there"


def _newest(workdir: str) -> int | CheckpointError | None:
    """The step of the newest checkpoint; the error if nobody knows: what a run says at its end must not hide how it
    ended."""
    try:
        return max(checkpoint_format.steps_in(pathlib.Path(workdir) / "checkpoints"), default=None)
    except CheckpointError as error:
        return error
