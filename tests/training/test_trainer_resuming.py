"""A run goes on where it was stopped, bit for bit, and what is not the same run is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable

import tfpar
from tests.training.trainers import (
    BATCH,
    CLASSES,
    EXAMPLES,
    SPARSE,
    another_trainer,
    assert_same_bits,
    everything,
    model,
    source,
    trainer_of,
)
from tfpar.checkpoint import checkpointer, workdir_lock
from tfpar.config import ConfigError, ExperimentConfig

import keras
import numpy as np
import pytest

# A run that is stopped and goes on

TOTAL = 14
EVALUATION = 2


def summary_of(workdir: pathlib.Path) -> dict:
    return json.loads((workdir / "summary.json").read_text(), parse_constant=lambda word: pytest.fail(f"JSON: {word}"))


@dataclasses.dataclass(frozen=True)
class Resumed:
    """A run that is stopped.

    Attributes:
      options: What it trains with.
      stops: Steps after which each start but the last one stops; 5 steps are an epoch.
      moved: Whether the state that must survive the stop is no longer the initial one at the end; else the comparison
        would compare constants.
    """

    options: dict
    stops: tuple[int, ...]
    moved: Callable[[tfpar.Trainer, dict], bool]


RESUMED = {
    # No evaluation is good enough: the rate is halved at every second one after the first.
    "plateau": Resumed(
        {
            "optimizer": "sgd",
            "schedule": "plateau",
            "schedule_args": "factor=0.5,patience=2,min_delta=100",
            "warmup_steps": 3,
            "learning_rate": 0.2,
        },
        (7, 4),
        lambda _, run: run["plateau"]["multiplier"] == 0.5**3,
    ),
    "loss scale": Resumed(
        {
            "optimizer": "adamw",
            "precision": "mixed_float16",
            "initial_loss_scale": 2.0**22,  # overflows at first
            "loss_scale_growth_steps": 3,
        },
        (7,),
        lambda _, run: (
            run["skipped"] > 0 and run["loss_scale"]["good_steps"] > 0 and run["loss_scale"]["scale"] < 2**22
        ),
    ),
    "moving averages": Resumed(
        {"optimizer": "adam", "schedule": "one_cycle", "ema": 0.8, "accumulate_steps": 2},
        (7,),
        lambda trainer, _: all(
            np.abs(average.numpy() - own.numpy()).max() > 1e-5
            for average, own in zip(trainer.program.eval_weights(), trainer.model.trainable_variables, strict=True)
        ),
    ),
    "xla": Resumed(
        {"optimizer": "adam", "schedule": "one_cycle", "accumulate_steps": 2, "jit_compile": True},
        (7,),
        lambda trainer, _: trainer.optimizer.iterations.numpy() == TOTAL,
    ),
    "mirrored": Resumed(
        {"optimizer": "lamb", "strategy": "mirrored", "devices": 2},
        (7,),
        lambda trainer, _: trainer.optimizer.iterations.numpy() == TOTAL,
    ),
}


@pytest.mark.parametrize("case", RESUMED.values(), ids=RESUMED)
def test_stopped_and_resumed_gives_the_bits_of_a_run_that_was_not(tmp_path, capsys, case):
    def run(name: str, **more) -> tuple[tfpar.Trainer, dict]:
        trainer = trainer_of(workdir=str(tmp_path / name), eval_every=EVALUATION, **case.options, **more)
        return trainer, trainer.fit(source(), steps=TOTAL, validation=source(11, 9))

    whole, summary = run("whole")
    done = 0
    for stop_after in case.stops:
        _, stopped = run("parts", stop_after=stop_after)
        done += stop_after
        assert f"stopped after step {done} of {TOTAL}" in capsys.readouterr().out
        assert stopped["steps"] == done
        assert not (tmp_path / "parts" / "summary.json").exists()
    parts, resumed = run("parts")
    assert f"resumed from step {done} (epoch {done / 5:.2f})" in capsys.readouterr().out

    assert_same_bits(everything(whole), everything(parts))
    for name in ("steps", "eval", "params_sha256", "skipped_steps"):
        assert resumed[name] == summary[name], name
    assert summary_of(tmp_path / "parts") == resumed
    last = [checkpointer.Checkpointer(tmp_path / name).latest() for name in ("whole", "parts")]
    assert last[0].step == last[1].step == TOTAL
    assert last[0].run == last[1].run
    assert case.moved(parts, last[1].run)


def test_weights_in_bfloat16_are_saved_and_read(tmp_path):
    def in_bfloat16() -> keras.Model:
        """With a layer that does not train, whose weights have a file of their own."""
        frozen, trained = (keras.layers.Dense(8, dtype="bfloat16", trainable=learns) for learns in (False, True))
        return keras.Sequential([keras.Input((6,)), frozen, trained, keras.layers.Dense(CLASSES)], name="net")

    def run(workdir: str, **options) -> dict[str, np.ndarray]:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        trainer = trainer_of(in_bfloat16, optimizer, precision="mixed_bfloat16", workdir=workdir, **options)
        assert not trainer.fit(source(), steps=3)["failed_checkpoints"]
        return everything(trainer)

    whole = run("")
    run(str(tmp_path), stop_after=2)
    assert_same_bits(run(str(tmp_path)), whole)


def test_resuming_does_not_depend_on_how_often_checkpoints_were_written(tmp_path):
    def run(name: str, **more) -> tfpar.Trainer:
        trainer = trainer_of(workdir=str(tmp_path / name), **more)
        trainer.fit(source(), steps=9)
        return trainer

    whole = run("whole", checkpoint_every=4)
    run("parts", checkpoint_every=3, stop_after=4, steps_per_loop=2)
    assert checkpointer.Checkpointer(tmp_path / "parts").steps() == [3, 4]
    assert_same_bits(everything(whole), everything(run("parts", checkpoint_every=5)))


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path, capsys):
    options = {"schedule": "constant", "optimizer": "adam"}
    whole = trainer_of(**options)
    whole.fit(source(), steps=9)
    trainer_of(workdir=str(tmp_path), **options).fit(source(), steps=4)
    longer = trainer_of(workdir=str(tmp_path), **options)
    longer.fit(source(), steps=9)
    assert "resumed from step 4" in capsys.readouterr().out
    assert summary_of(tmp_path)["steps"] == 9
    assert_same_bits(everything(whole), everything(longer))


def test_a_second_trainer_of_the_same_program_resumes_too(tmp_path, capsys):
    """Keras counts names over all models of a process (sequential_1, dense_1, adam_1); it is still the same run."""

    def unnamed() -> keras.Model:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.1), keras.layers.Dense(CLASSES)])

    options = {"schedule": "constant", "optimizer": "adam", "steps": 6}
    whole = another_trainer(unnamed, **options)
    whole.fit(source())
    another_trainer(unnamed, workdir=str(tmp_path), stop_after=2, **options).fit(source())
    resumed = another_trainer(unnamed, workdir=str(tmp_path), **options)
    resumed.fit(source())
    assert "resumed from step 2" in capsys.readouterr().out
    for one, other in zip(
        whole.program.checkpoint_variables().values(), resumed.program.checkpoint_variables().values(), strict=True
    ):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=one.path)


def test_a_resumed_run_normalises_by_the_saved_statistics(tmp_path):
    def normalizing(*adapted: np.ndarray) -> keras.Model:
        norm = keras.layers.Normalization(name="norm")
        norm.build((None, 6))  # otherwise the paths of its variables depend on whether it is adapted
        for data in adapted:
            norm.adapt(data)
        return keras.Sequential([keras.Input((6,)), norm, keras.layers.Dense(CLASSES, name="head")], name="net")

    options = {"schedule": "constant", "optimizer": "sgd", "steps": 1, "workdir": str(tmp_path)}
    data = np.random.default_rng(0).normal(5.0, 3.0, size=(16, 6)).astype(np.float32)
    adapted, plain = normalizing(data), normalizing()
    another_trainer(adapted, **options).fit(source())
    another_trainer(plain, **options).fit(source())
    np.testing.assert_array_equal(plain(data), adapted(data))


@pytest.mark.parametrize("eval_every", [0, 1000])
def test_the_training_loss_is_that_of_the_last_epoch_also_after_resuming_with_more(tmp_path, eval_every):
    """As Keras' History has it; an interval of evaluations that never comes does not matter."""

    def run(workdir: pathlib.Path, epochs: float, *callbacks: keras.callbacks.Callback) -> float:
        trainer = trainer_of(workdir=str(workdir), eval_every=eval_every, schedule="constant", learning_rate=0.02)
        return trainer.fit(source(), epochs=epochs, callbacks=callbacks)["train_loss"]

    history = keras.callbacks.History()
    whole = run(tmp_path / "whole", 3.0, history)
    assert whole == pytest.approx(history.history["loss"][-1], rel=1e-6)
    assert whole < 0.95 * history.history["loss"][0]
    run(tmp_path / "resumed", 1.4)
    assert run(tmp_path / "resumed", 3.0) == whole
    run(tmp_path / "again", 2.4)  # in the middle of the last epoch
    assert run(tmp_path / "again", 3.0) == whole


TIMES = {"examples_per_second", "step_ms_p50", "step_ms_p95", "input_wait_fraction", "mfu"}


def test_a_finished_run_says_so_and_writes_the_same_summary(tmp_path, capsys):
    def run() -> dict:
        trainer = trainer_of(workdir=str(tmp_path), eval_every=2, ema=0.5)
        return trainer.fit(source(), steps=5, validation=source(11, 9))

    first = run()
    assert summary_of(tmp_path) == first
    saved = keras.saving.load_model(tmp_path / "model.keras").get_weights()
    (tmp_path / "model.keras").unlink()
    capsys.readouterr()
    events = {path: path.stat().st_mtime_ns for path in (tmp_path / "train").rglob("*") if path.is_file()}
    again = run()
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "train").rglob("*") if p.is_file()} == events
    assert "finished" in capsys.readouterr().out
    assert summary_of(tmp_path) == again
    for name, value in first.items():
        # Nothing was timed this time: the figures of before or none, but not zero.
        assert again[name] == value or (name in TIMES and again[name] is None), name
    for one, other in zip(saved, keras.saving.load_model(tmp_path / "model.keras").get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


# The same run or another one


def test_other_data_in_the_same_workdir_is_refused(tmp_path):
    trainer_of(workdir=str(tmp_path)).fit(source(), steps=2)
    before = {
        path: path.stat().st_mtime_ns
        for path in tmp_path.rglob("*")
        if path.is_file() and "tfevents" not in path.name and path.name != workdir_lock.NAME
    }
    with pytest.raises(ConfigError, match=r"--dataset=.*the data set is not the one the run in .* was trained on"):
        trainer_of(workdir=str(tmp_path)).fit(source(EXAMPLES + 1), steps=4)
    after = {path: path.stat().st_mtime_ns for path in before}
    assert after == before


def test_another_configuration_in_the_same_workdir_is_refused(tmp_path):
    trainer_of(workdir=str(tmp_path), clip_norm=1.0).fit(source(), steps=2)
    with pytest.raises(ConfigError, match=r"--clip_norm: 1\.0 -> 2\.0"):
        trainer_of(workdir=str(tmp_path), clip_norm=2.0)


def test_another_model_in_the_same_workdir_is_refused(tmp_path):
    trainer_of(workdir=str(tmp_path)).fit(source(), steps=2)

    def wider() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES, name="other")], name="net")

    trainer = trainer_of(wider, workdir=str(tmp_path))
    before = everything(trainer)
    message = r"does not fit this model and optimizer: missing model/net/other/kernel.* or begin in another workdir\."
    with pytest.raises(ConfigError, match=message):
        trainer.fit(source(), steps=4)
    assert_same_bits(before, everything(trainer))


def docs_trainer(workdir: str, optimizer: Callable[[], keras.optimizers.Optimizer | str], **options) -> tfpar.Trainer:
    """As docs/strategies.md says for objects: first the strategy, from a configuration of its own."""
    config = ExperimentConfig.from_flat_dict({"global_batch_size": BATCH, "jit_compile": "false", "workdir": workdir})
    runtime = tfpar.initialize(config)
    return tfpar.Trainer(model(), optimizer(), SPARSE, ["accuracy"], config=config, runtime=runtime, **options)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "optimizer": "sgd"}, {"config": None}])
def test_a_run_with_objects_and_a_runtime_resumes(tmp_path, options):
    options = dict(options)
    kind = options.pop("optimizer", None)
    optimizer = (lambda: kind) if kind else (lambda: keras.optimizers.SGD(0.1))
    if "config" in options:  # started without a configuration, which records the model and the data as custom
        first = trainer_of(model(), optimizer(), workdir=str(tmp_path), stop_after=3)
        options = {}
    else:
        first = docs_trainer(str(tmp_path), optimizer, stop_after=3, **options)
    assert first.fit(source(), steps=6)["steps"] == 3
    assert docs_trainer(str(tmp_path), optimizer, **options).fit(source(), steps=6)["steps"] == 6


def test_other_arguments_than_those_of_the_saved_run_are_refused(tmp_path):
    docs_trainer(str(tmp_path), lambda: "sgd", clip_norm=1.0).fit(source(), steps=2)
    with pytest.raises(ConfigError, match=r"--clip_norm: 1\.0 -> 2\.0\. "):
        docs_trainer(str(tmp_path), lambda: "sgd", clip_norm=2.0)
    with pytest.raises(ConfigError, match=r"--optimizer: 'sgd' -> 'custom'"):
        docs_trainer(str(tmp_path), keras.optimizers.SGD, clip_norm=1.0)


@pytest.mark.parametrize("optimizer", [None, "lion", keras.optimizers.SGD])
def test_a_program_records_what_it_gave(tmp_path, optimizer):
    made = optimizer(0.01) if isinstance(optimizer, type) else optimizer
    trainer_of(optimizer=made, workdir=tmp_path).fit(source(), steps=1)
    saved = checkpointer.saved_config(tmp_path)
    assert (saved["model"], saved["dataset"]) == ("custom", "custom")
    assert saved["optimizer"] == {None: "adamw", "lion": "lion"}.get(optimizer, "custom")
    with pytest.raises(ConfigError, match="--optimizer: "):
        trainer_of(optimizer="sgd", workdir=tmp_path)


def test_a_run_goes_on_with_the_optimizer_it_had(tmp_path):
    def run(optimizer: keras.optimizers.Optimizer, steps: int, **options) -> dict:
        return trainer_of(optimizer=optimizer, workdir=tmp_path, **options).fit(source(), steps=steps)

    run(keras.optimizers.Adam(0.01), 2)
    with pytest.raises(ConfigError, match=r"has another one \(learning_rate 0\.0\d+ -> .*beta_1 0\.9 -> 0\.5"):
        run(keras.optimizers.Adam(0.1, beta_1=0.5), 4)
    keras.optimizers.Adam(0.3)  # Keras counts names
    assert run(keras.optimizers.Adam(0.01), 4)["steps"] == 4


def test_state_that_is_not_finite_is_named_once(tmp_path, messages):
    """The variance of a batch overflows, and the loss is that of zeros."""
    trainer = trainer_of(
        lambda: keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)]),
        workdir=str(tmp_path),
        checkpoint_every=1,
    )
    x, y = np.random.default_rng(0).normal(size=(16, 6)) * 1e25, np.zeros(16, np.int32)
    summary = trainer.fit(x.astype(np.float32), y, steps=3)
    assert summary["skipped_steps"] == 0
    [line] = [line for line in messages if "NaN or infinity" in line]
    assert "since step 1 at the latest" in line
    assert "sequential/batch_normalization/moving_variance, although the loss is finite" in line
