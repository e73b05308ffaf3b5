"""What a run says before it starts and when it ends."""

from __future__ import annotations

import logging
import pathlib
from typing import TYPE_CHECKING

from tfpar import models
from tfpar.checkpoint import format as checkpoint_format
from tfpar.exchange import Traffic
from tfpar.monitor import samples, summary
from tfpar.monitor.monitor import Monitor
from tfpar.optim.keras_internals import all_layers

import keras

if TYPE_CHECKING:
    from tfpar.training.trainer import Trainer


def build_monitor(trainer: Trainer, total: int) -> Monitor:
    """The monitor of a run, with the model's cost for its MFU figure."""
    described = trainer.description
    return Monitor(
        trainer.config.checkpoint.workdir or None,
        is_chief=trainer.topology.is_chief,
        config=trainer.config,
        total_steps=total,
        flops_per_example=described.training_flops_per_example if described else None,
        peak_flops=_peak_flops_per_replica(trainer) if described and trainer.topology.is_chief else None,
        replicas=trainer.topology.replicas,
        metric_results=trainer.core.metric_results,
    )


def _peak_flops_per_replica(trainer: Trainer) -> float:
    # Logical devices share the cores of their host, with each other and with all workers that run on it.
    plan = trainer.topology
    replicas = plan.local_replicas
    if plan.cluster is not None:
        workers = [task for job, tasks in plan.cluster.cluster.items() if job == "worker" for task in tasks]
        workers += plan.cluster.cluster.get("chief", ()) if plan.synchronous else ()
        host = plan.cluster.address.rpartition(":")[0]
        replicas *= max(1, sum(task.rpartition(":")[0] == host for task in workers))
    return models.peak_flops(trainer.config.precision.precision).of_replica(replicas)


def announce(run: summary.Run) -> None:
    """Prints model, input and exchange before step 1."""
    trainer, monitor = run.trainer, run.monitor
    if not trainer.topology.is_chief:
        return
    traffic = run.traffic
    exchange_text = f"exchange {trainer.exchange.describe()}: "
    exchange_text += _bytes_text(traffic) if trainer.topology.replicas > 1 else "one replica, nothing travels"
    step_text = f"step: {trainer.config.precision.precision}, XLA {'on' if trainer.jit_compile else 'off'}"
    if trainer.config.train.jit_compile == "auto" and not trainer.jit_compile:
        step_text += f" ({trainer.why_no_xla()})"
    for text in (_model_text(trainer), _input_text(run), trainer.exchange.plan_table, exchange_text, step_text):
        if text:
            monitor.message(text)
    warn_of_counted_padding(run)


def warn_of_counted_padding(run: summary.Run) -> None:
    """Says so where Keras' batch normalisation would take padding for examples."""
    if not run.pipeline.pads:
        return
    counting = [
        layer.name
        for layer in all_layers(run.trainer.model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and not isinstance(layer, models.BatchNormalization)
        and layer.trainable
    ]
    if counting:
        run.monitor.message(
            f"keras.layers.BatchNormalization ({counting[0]}{' ...' * (len(counting) > 1)}) takes the padding "
            "of batches that are not full for examples. tfpar.models.BatchNormalization leaves it out (same "
            "arguments); or use --remainder=drop.",
            logging.WARNING,
        )


def record_start(run: summary.Run) -> None:
    """Records model, input and sample inputs in TensorBoard, once it is known that there is something to train."""
    if not run.trainer.topology.is_chief:
        return
    run.monitor.text("model", _model_text(run.trainer))
    run.monitor.text("input", _input_text(run))
    samples.write_inputs(run.monitor, run.train)


def _input_text(run: summary.Run) -> str:
    return run.pipeline.report(asynchronous=not run.trainer.topology.synchronous)


def _model_text(trainer: Trainer) -> str:
    described = trainer.description
    if described is None:
        return f"{trainer.model.name}: {trainer.model.count_params():,} parameters, cost unknown before it runs"
    return models.format_summary(described, trainer.model.name)


def _bytes_text(traffic: Traffic) -> str:
    text = f"{traffic.payload_bytes / 1e6:.3f} MB a step, {traffic.wire_bytes / 1e6:.3f} MB sent by each"
    if traffic.dense_bytes > traffic.wire_bytes:
        text += f", dense {traffic.dense_bytes / 1e6:.3f} MB ({traffic.dense_bytes / traffic.wire_bytes:.1f}x)"
    return text


def warn_of_skipped(run: summary.Run) -> None:
    """Says plainly that a run, or its end, changed no weight."""
    if not run.skipped or run.train_loss is not None:
        return
    which = f"all {run.steps_done} updates" if run.skipped == run.steps_done else "the last updates"
    run.monitor.message(
        f"{which} were skipped because loss or gradients were not finite: the model has learned nothing from "
        "them. Likely causes: NaN or infinity in the inputs, labels outside the model's outputs, a --learning_rate "
        "that is too high (lower it, or give --clip_norm), overflow in --precision=mixed_float16.",
        logging.WARNING,
    )


def note_end(run: summary.Run, finished: bool, preempted: bool, unit: str) -> None:
    """Notes how this start ended, and says so where the run is to go on, and from which checkpoint it can.

    Call it once the last checkpoint is written.

    Args:
      run: The run.
      finished: Whether all of it is done.
      preempted: Whether it was asked to end.
      unit: What its updates are called.
    """
    run.journal.end("finished" if finished else "preempted" if preempted else "stopped")
    if not finished:
        why = "asked to end (SIGTERM): " if preempted else ""
        run.monitor.message(f"{why}stopped after {unit} {run.steps_done} of {run.total}; {_way_on(run, unit)}")


def _way_on(run: summary.Run, unit: str) -> str:
    """What another start would find."""
    workdir = run.trainer.config.checkpoint.workdir
    if not workdir:
        return "without --workdir nothing is kept, another start begins anew"
    newest = max(checkpoint_format.steps_in(pathlib.Path(workdir) / "checkpoints"), default=None)
    if newest is None:
        return "no checkpoint could be saved, another start begins anew"
    failed = "" if newest >= run.steps_done else f"{unit} {run.steps_done} could not be saved, "
    return f"{failed}the newest checkpoint is of {unit} {newest}; start again to go on there"
