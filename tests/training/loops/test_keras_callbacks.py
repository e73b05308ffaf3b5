"""Keras callbacks under tfpar's loop, beside what Keras' own `fit` gives them."""

from __future__ import annotations

import csv
import dataclasses
import functools

import tfpar
from tests.training.trainers import BATCH, CLASSES, EXAMPLES, SPARSE, source, trainer_of
from tfpar.config import ConfigError, StrategyConfig
from tfpar.parallel.topology import Topology, choose_topology
from tfpar.training.loops.keras_callbacks import KerasCallbacks, check_callbacks
from tfpar.training.loops.state import LoopState

import keras
import numpy as np
import pytest

EPOCH = EXAMPLES // BATCH


class Recorder(keras.callbacks.Callback):
    """Writes down every call, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_begin(self, logs=None):
        self.calls.append(("train begin",))

    def on_train_end(self, logs=None):
        self.calls.append(("train end",))

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(("epoch begin", epoch))

    def on_epoch_end(self, epoch, logs=None):
        weights = [value.copy() for value in self.model.get_weights()]
        self.calls.append(("epoch end", epoch, dict(logs), weights))

    def epoch_ends(self):
        return [call for call in self.calls if call[0] == "epoch end"]


class BatchRecorder(Recorder):
    """Batches too, and evaluations and predictions."""

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(("batch begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("batch end", batch, dict(logs)))

    def on_test_begin(self, logs=None):
        self.calls.append(("test begin",))

    def on_test_batch_begin(self, batch, logs=None):
        self.calls.append(("test batch begin", batch))

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(("test batch end", batch, dict(logs)))

    def on_test_end(self, logs=None):
        self.calls.append(("test end", 0, dict(logs)))

    def on_predict_begin(self, logs=None):
        self.calls.append(("predict begin",))

    def on_predict_batch_begin(self, batch, logs=None):
        self.calls.append(("predict batch begin", batch))

    def on_predict_batch_end(self, batch, logs=None):
        self.calls.append(("predict batch end", batch, {"outputs": np.asarray(logs["outputs"])}))

    def on_predict_end(self, logs=None):
        self.calls.append(("predict end",))


class StoppingRecorder(BatchRecorder):
    """Stops training, and each evaluation and prediction of its own, within an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self.model.stop_training = self.calls.count(("batch begin", 1)) == 2 and batch == 1

    def on_test_batch_end(self, batch, logs=None):
        super().on_test_batch_end(batch, logs)
        self.model.stop_evaluating = True

    def on_predict_batch_end(self, batch, logs=None):
        super().on_predict_batch_end(batch, logs)
        self.model.stop_predicting = True


def plain() -> keras.Model:
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(CLASSES)]
    return keras.Sequential(layers, name="net")


def layout(replicas: int) -> dict:
    return {"strategy": "mirrored" if replicas > 1 else "one_device", "devices": replicas, "shuffle": False}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", [Recorder, BatchRecorder, StoppingRecorder])
def test_calls_and_logs_are_those_of_keras(kind, replicas):
    """Without shuffling, and by plain gradient descent, the two train alike."""
    trainer = trainer_of(plain, keras.optimizers.SGD(0.05), eval_batch_size=BATCH, **layout(replicas))
    theirs = keras.models.clone_model(trainer.model)
    theirs.set_weights(trainer.model.get_weights())
    ours, expected = kind(), kind()
    adding = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(twice=2 * epoch))
    train, held_out = source(), source(11, 9)
    result = trainer.fit(train, epochs=2, validation=held_out, callbacks=[adding, ours])

    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    theirs.compile(keras.optimizers.SGD(0.05), SPARSE, metrics=[accuracy], jit_compile=False)
    x, y = arrays(EXAMPLES, 0)
    history = theirs.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=arrays(11, 9),
        callbacks=[adding, expected],
    )
    trainer.evaluate(held_out, callbacks=[ours])
    theirs.evaluate(*arrays(11, 9), batch_size=BATCH, verbose=0, callbacks=[expected])
    predicted = trainer.predict(held_out, callbacks=[ours])
    again = theirs.predict(arrays(11, 9)[0], batch_size=BATCH, verbose=0, callbacks=[expected])
    np.testing.assert_allclose(predicted, again, rtol=1e-4, atol=1e-6)

    assert result.epoch == history.epoch
    assert result.history.keys() == history.history.keys()
    for name, values in history.history.items():
        assert result.history[name] == pytest.approx(values, rel=1e-4, abs=1e-6)
    assert [call[:2] for call in ours.calls] == [call[:2] for call in expected.calls]
    for one, other in zip(ours.calls, expected.calls, strict=True):
        assert (len(one) > 2) == (len(other) > 2)
        if len(one) > 2:
            assert one[2].keys() == other[2].keys()
            for name, value in other[2].items():
                np.testing.assert_allclose(one[2][name], value, rtol=1e-4, atol=1e-6)
    for one, other in zip(ours.epoch_ends(), expected.epoch_ends(), strict=True):
        for mine, keras_own in zip(one[3], other[3], strict=True):
            np.testing.assert_allclose(mine, keras_own, rtol=1e-4, atol=1e-6)


def arrays(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of `source`."""
    x = np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)
    return x, (np.abs(x).sum(axis=1) % CLASSES).astype(np.int32)


@pytest.mark.parametrize(
    ("build", "every"),
    [
        (Recorder, EPOCH),
        (BatchRecorder, 1),
        (lambda: keras.callbacks.ModelCheckpoint("unused.keras"), EPOCH),
        (lambda: keras.callbacks.ModelCheckpoint("unused.keras", save_freq=2), 1),
        (lambda: keras.callbacks.LambdaCallback(on_epoch_end=print), EPOCH),
        (lambda: keras.callbacks.LambdaCallback(on_train_batch_end=print), 1),
    ],
)
def test_only_methods_of_batches_make_the_loop_stop_at_each(build, every):
    bridge = KerasCallbacks(
        [build()],
        trainer_of(plain).program,
        steps_per_epoch=EPOCH,
        total=10,
        current_rate=None,
        metric_results=lambda sums: {},
    )
    assert [hook.every for hook in bridge.ends_of_epochs] == [every]
    assert len(bridge.ends_of_batches) == (every == 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_callbacks_that_people_use(tmp_path, replicas):
    log, best = tmp_path / "log.csv", tmp_path / "best.keras"
    lines = []
    trainer = trainer_of(plain, optimizer="sgd", schedule="constant", learning_rate=0.1, **layout(replicas))
    stopping = keras.callbacks.EarlyStopping(patience=1, min_delta=100, start_from_epoch=2, restore_best_weights=True)
    summary = trainer.fit(
        source(),
        epochs=9,
        validation=source(11, 9),
        callbacks=[
            stopping,
            keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=100),
            keras.callbacks.CSVLogger(log),
            keras.callbacks.ModelCheckpoint(best, save_best_only=True),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: lines.append(epoch)),
        ],
    )
    assert lines == [0, 1, 2, 3]
    assert summary["steps"] == 4 * EPOCH
    rows = list(csv.DictReader(log.open()))
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([0.1, 0.1, 0.05, 0.025])
    # The weights of the third epoch have come back: the results are theirs.
    assert stopping.best_epoch == 2
    assert summary["eval"]["loss"] == pytest.approx(float(rows[2]["val_loss"]), rel=1e-5)
    assert trainer.evaluate(source(11, 9))["loss"] == pytest.approx(float(rows[2]["val_loss"]), rel=1e-5)
    assert [value.shape for value in keras.saving.load_model(best).get_weights()] == [
        value.shape for value in trainer.model.get_weights()
    ]
    assert "optimizer" not in vars(trainer.model)


def test_a_last_epoch_that_is_not_complete_ends_too():
    recorder = Recorder()
    trainer_of(plain).fit(source(), steps=EPOCH + 2, callbacks=[recorder])
    assert [call[:2] for call in recorder.calls] == [
        ("train begin",),
        ("epoch begin", 0),
        ("epoch end", 0),
        ("epoch begin", 1),
        ("epoch end", 1),
        ("train end",),
    ]


def test_a_resumed_run_goes_on_in_its_epoch(tmp_path):
    first, second = Recorder(), Recorder()
    options = {"workdir": str(tmp_path)}
    trainer_of(plain, stop_after=EPOCH + 1, **options).fit(source(), steps=2 * EPOCH, callbacks=[first])
    trainer_of(plain, **options).fit(source(), steps=2 * EPOCH, callbacks=[second])
    assert [call[:2] for call in first.calls[1:]] == [
        ("epoch begin", 0),
        ("epoch end", 0),
        ("epoch begin", 1),
        ("train end",),
    ]
    assert [call[:2] for call in second.calls[1:]] == [("epoch begin", 1), ("epoch end", 1), ("train end",)]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda: print, "expected Keras callbacks"),
        (lambda: keras.callbacks.BackupAndRestore("backup"), "BackupAndRestore is not supported; --workdir"),
        (lambda: keras.callbacks.SwapEMAWeights(), "SwapEMAWeights is not supported; --ema"),
    ],
)
def test_callbacks_that_are_refused(callback, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(plain).fit(source(), steps=1, callbacks=[callback()])


def test_one_callback_needs_no_list_and_none_is_none():
    """As for Keras' methods."""
    callback, topology = keras.callbacks.TerminateOnNaN(), choose_topology(StrategyConfig(strategy="one_device"))
    assert check_callbacks(callback, topology) == check_callbacks([[callback]], topology) == [callback]
    trainer, epochs = trainer_of(plain), []
    counted = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    trainer.fit(source(), steps=EPOCH, callbacks=counted)
    assert epochs == [0]
    assert trainer.evaluate(source(), callbacks=None)["examples"] > 0


def test_parameter_servers_refuse_methods_of_batches_by_name():
    epochs_only = [Recorder(), keras.callbacks.EarlyStopping(), keras.callbacks.ModelCheckpoint("best.keras")]
    servers = Topology(name="parameter_server")
    check_callbacks(epochs_only, servers)
    for callback in (BatchRecorder(), keras.callbacks.TerminateOnNaN()):
        with pytest.raises(
            ConfigError, match=f"{type(callback).__name__} has a method for every batch.*parameter_server"
        ):
            check_callbacks([callback], servers)


def test_meshes_refuse_to_save_parts_of_weights():
    callback = keras.callbacks.ModelCheckpoint("best.keras")
    check_callbacks([callback], Topology(name="mirrored"))
    with pytest.raises(ConfigError, match=r"ModelCheckpoint would save parts .* --workdir keeps"):
        check_callbacks([callback], Topology(name="mirrored", model_devices=2))
    check_callbacks([callback], Topology(name="mirrored"), "gradients")
    with pytest.raises(ConfigError, match=r"parts of the weights, which --shard=weights divides"):
        check_callbacks([callback], Topology(name="mirrored"), "weights")


def test_the_history_of_a_resumed_run_has_the_epochs_of_this_start(tmp_path):
    """Evaluations at other steps than the ends of epochs are not in it, and an incomplete last epoch is."""
    options = {"workdir": str(tmp_path), "eval_every": EPOCH + 1, **layout(1)}
    first = trainer_of(plain, optimizer="sgd", **options).fit(source(), steps=EPOCH, validation=source(11, 9))
    assert (first.epoch, list(first.history)) == ([0], ["loss", "accuracy", "val_loss", "val_accuracy"])  # the last
    second = trainer_of(plain, optimizer="sgd", **options).fit(source(), steps=3 * EPOCH + 1)
    assert (second.epoch, list(second.history)) == ([1, 2, 3], ["loss", "accuracy"])
    again = trainer_of(plain, optimizer="sgd", **options).fit(source(), steps=3 * EPOCH + 1)
    assert (again.epoch, again.history, again["steps"]) == ([], {}, 3 * EPOCH + 1)


@pytest.mark.parametrize("stops_by", ["hook", "stop_after"])
def test_a_stop_within_an_epoch_ends_the_epoch_if_it_ends_the_run(stops_by, tmp_path):
    """A hook's does, as `stop_training` in a batch; an epoch that a resumed run will continue goes on there."""
    recorder, last = Recorder(), []
    stop = [tfpar.Hook(EPOCH + 2, lambda state: state.replace(stop=True))] if stops_by == "hook" else []
    last_stop = tfpar.Hook(100, lambda state: last.append(state.step), also=lambda state: state.ending)
    options = {"stop_after": EPOCH + 2} if stops_by == "stop_after" else {}
    trainer = trainer_of(plain, workdir=str(tmp_path), **options)
    result = trainer.fit(source(), epochs=3, validation=source(11, 9), hooks=[last_stop, *stop], callbacks=[recorder])
    assert last == [EPOCH + 2]
    assert result.epoch == [0, 1]
    ends = recorder.epoch_ends()
    assert [call[1] for call in ends] == ([0, 1] if stops_by == "hook" else [0])
    if stops_by == "hook":
        assert result["eval"]["loss"] == result.history["val_loss"][1] == ends[1][2]["val_loss"]


def test_the_summary_names_the_callback_that_stopped_the_run():
    trainer = trainer_of(plain, optimizer="sgd", schedule="constant")
    never_better = keras.callbacks.EarlyStopping(monitor="val_loss", mode="max", patience=0, min_delta=100.0)
    summary = trainer.fit(source(), epochs=9, validation=source(11, 9), callbacks=[never_better])
    assert summary["steps"] < 9 * EPOCH
    assert summary["stopped_by"] == "the callback EarlyStopping"

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    assert trainer.fit(source(), epochs=9, callbacks=[Own()])["stopped_by"] == "a Keras callback"
    assert trainer.fit(source(), epochs=1)["stopped_by"] is None


@pytest.mark.parametrize("is_chief", [True, False])
def test_callbacks_print_on_the_chief_only(capsys, is_chief):
    trainer = trainer_of(plain, keras.optimizers.SGD(0.05), verbose=0)
    trainer.program.bind(source())
    rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate, verbose=1)
    bridge = KerasCallbacks(
        [rates],
        dataclasses.replace(trainer.program, topology=ChiefOrNot(trainer.topology, is_chief)),
        steps_per_epoch=EPOCH,
        total=EPOCH,
        current_rate=None,
        metric_results=lambda _: {},
    )
    bridge.begin(LoopState(0, EPOCH))
    bridge.release()
    assert ("setting learning rate" in capsys.readouterr().out) == is_chief
    assert rates.verbose == 1


class ChiefOrNot:
    """A topology that is the chief's, or another worker's."""

    def __init__(self, topology, is_chief):
        self._topology, self.is_chief = topology, is_chief

    def __getattr__(self, name):
        return getattr(self._topology, name)


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        (functools.partial(keras.callbacks.EarlyStopping, patience=0), "monitor_op"),
        (functools.partial(keras.callbacks.ReduceLROnPlateau, patience=1), "monitor_op"),
        (functools.partial(keras.callbacks.ModelCheckpoint, "best.keras", save_best_only=True), "monitor_op"),
    ],
)
@pytest.mark.parametrize(("monitor", "better"), [("val_accuracy", 1.0), ("accuracy", 1.0), ("val_loss", -1.0)])
def test_a_metric_that_is_monitored_says_what_is_better(kind, attribute, monitor, better, tmp_path, monkeypatch):
    """As in Keras, which finds it among the metrics of `compile`."""
    monkeypatch.chdir(tmp_path)
    callback = kind(monitor=monitor)
    trainer_of(plain).fit(source(), epochs=1, validation=source(11, 9), callbacks=[callback])
    assert bool(getattr(callback, attribute)(better, 0.0))
    assert not bool(getattr(callback, attribute)(-better, 0.0))
    assert callback.mode == "auto"
