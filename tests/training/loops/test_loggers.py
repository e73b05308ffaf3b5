"""Hooks that log a run elsewhere, with the real libraries and without a network."""

from __future__ import annotations

import csv
import importlib.util
import json
import struct

import tfpar
from tfpar import inputs

import keras
import mlflow
import numpy as np
import pytest
import wandb
from wandb.proto import wandb_internal_pb2


def fit(hooks, *, steps=6, callbacks=(), **options):
    x = np.random.default_rng(0).normal(size=[40, 8]).astype(np.float32)
    source = inputs.from_arrays(x, (x[:, 0] > 0).astype(np.int32), num_classes=2, name="signs")
    trainer = tfpar.Trainer(
        lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        strategy="one_device",
        jit_compile="false",
        global_batch_size=10,
        learning_rate=0.1,
        eval_every=4,
        **options,
    )
    losses: list[tuple[int, float]] = []
    record = tfpar.Hook(2, lambda state: losses.append((state.step, state.since.results()["loss"])))
    result = trainer.fit(source, steps=steps, validation=source, hooks=[*hooks, record], callbacks=callbacks)
    return losses, result


def test_a_csv_file_has_a_row_every_so_many_steps_and_continues(tmp_path):
    path = tmp_path / "logs" / "log.csv"
    losses, _ = fit([tfpar.loggers.csv(path, every=2)], workdir=tmp_path / "run", stop_after=4, steps=6)
    path.write_text(path.read_text() + "6,train,0.0,9.0,9.0,,\n")  # a row that the checkpoint knows nothing of
    more, result = fit([tfpar.loggers.csv(path, every=2)], workdir=tmp_path / "run", steps=6)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == losses + more
    assert [row["step"] for row in rows] == ["2", "4", "6"]
    assert [bool(row["val_loss"]) for row in rows] == [False, True, True]
    assert float(rows[-1]["val_loss"]) == result["eval"]["loss"]
    assert float(rows[-1]["val_accuracy"]) == result["eval"]["accuracy"]


@pytest.mark.parametrize("failing", [3, 5])  # after the step of the next run's first row, or of a later one
def test_a_hook_logs_each_of_several_runs(tmp_path, failing):
    """Also after one that failed: its end is not told to the hook."""
    path, hook = tmp_path / "log.csv", tfpar.loggers.csv(tmp_path / "log.csv", every=2)

    def fail(state):
        raise OverflowError

    evaluated = []
    with pytest.raises(OverflowError):
        fit([hook, tfpar.Hook(failing, fail)])
    for _ in range(2):
        fit([hook])
        with path.open(newline="") as file:
            evaluated.append([(row["step"], bool(row["val_loss"])) for row in csv.DictReader(file)])
    assert evaluated == [[("2", False), ("4", True), ("6", True)]] * 2


def test_mlflow_gets_metrics_parameters_and_an_end(tmp_path):
    store = f"sqlite:///{tmp_path}/mlflow.db"  # where nobody names a server, MLflow keeps such a file
    mlflow.set_tracking_uri(store)
    hook = tfpar.loggers.mlflow(every=2, experiment="signs", params={"learning_rate": 0.1}, run_name="first")
    losses, result = fit([hook])
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("signs").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params == {"learning_rate": "0.1"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == losses
    assert run.data.metrics["val_loss"] == result["eval"]["loss"]
    assert mlflow.active_run() is None


class StopAfterAnEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


@pytest.mark.parametrize("every", [2, 3])
def test_a_run_that_a_callback_ends_has_its_last_row_and_an_end(tmp_path, every):
    """At a multiple of the logger's interval and elsewhere: an epoch has four steps."""
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    path = tmp_path / "log.csv"
    hooks = [tfpar.loggers.csv(path, every=every), tfpar.loggers.mlflow(every=every, experiment="stopped")]
    _, result = fit(hooks, steps=12, callbacks=[StopAfterAnEpoch()])
    assert result["steps"] == 4
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(every), "4"]
    assert float(rows[-1]["val_loss"]) == result["eval"]["loss"]
    assert mlflow.active_run() is None


def records(data: bytes):
    """What an offline run of Weights & Biases has written: a log as LevelDB's, of protocol buffers."""
    assert len(data) < 1 << 15  # one block: no record is cut
    place = 7  # after the file's header
    while place + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, place)
        assert kind == 1  # whole
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[place + 7 : place + 7 + length])
        yield record
        place += 7 + length


def test_weights_and_biases_gets_rows_and_options(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    hook = tfpar.loggers.wandb(every=2, mode="offline", dir=str(tmp_path), config={"learning_rate": 0.1})
    try:
        losses, result = fit([hook])
    finally:
        wandb.teardown()  # its service is a process of its own
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows, ended = [], False
    for record in records(path.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
        ended |= record.WhichOneof("record_type") == "exit"
    assert [(row["_step"], row["loss"]) for row in rows] == losses
    assert rows[-1]["val_accuracy"] == result["eval"]["accuracy"]
    assert ended


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_library_is_named_with_what_to_install(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(tfpar.ConfigError, match=rf"pip install 'tfpar\[{name}\]'"):
        getattr(tfpar.loggers, name)(every=2)


def test_only_the_chief_logs(tmp_path, monkeypatch):
    cluster = {"worker": ["a:1", "b:1"]}
    hook = tfpar.loggers.csv(tmp_path / "log.csv", every=1)
    state = tfpar.LoopState(1, 5, results={"loss": 0.5}, evaluated_at=1)
    for rank in (1, 0):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}))
        assert (tmp_path / "log.csv").exists() is False
        hook.run(state)
    assert "val_loss" in (tmp_path / "log.csv").read_text()
