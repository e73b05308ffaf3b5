"""A run that goes on: on other numbers of replicas, and what it says of where another start would go on."""

from __future__ import annotations

import os
import sys

import tfpar
from tests import nursery, permissions
from tests.checkpoint import small_disk
from tests.training.trainers import BATCH, everything, source, trainer_of
from tfpar.checkpoint import checkpointer
from tfpar.checkpoint.checkpointer import CheckpointError
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.process import exit_codes
from tfpar.training import uneven_batches

import numpy as np
import pytest

EVEN = {"uneven_batches": False, "strategy": "mirrored", "learning_rate": 0.01, "schedule": "constant", "seed": 5}


def test_on_three_replicas_after_two(tmp_path, capsys):
    """8 examples do not divide by 3. The steps are those of an undisturbed run, but for the order of the sums."""

    def run(name, replicas, **options):
        # Statistics of batches and random numbers are a replica's own, and would hide what is looked at here.
        trainer = trainer_of(plain, workdir=str(tmp_path / name), devices=replicas, **EVEN, **options)
        return trainer, trainer.fit(source(), steps=9)

    whole, _ = run("whole", 2)
    run("parts", 2, stop_after=4)
    assert "is not divisible" not in capsys.readouterr().out
    parts, summary = run("parts", 3)
    said = capsys.readouterr().out
    assert (
        f"--global_batch_size={BATCH} is not divisible by 3 replicas: this run continues with up to 3 examples for "
        "each, weighted by example, so that every step stays exact\n"
    ) in said
    assert "resumed from step 4" in said
    assert (summary["steps"], summary["replicas"]) == (9, 3)
    for name, value in everything(whole).items():
        np.testing.assert_allclose(everything(parts)[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def plain():
    import keras

    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
    return keras.Sequential(layers, name="net")


def test_a_fresh_start_is_still_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--global_batch_size=8 is not divisible by 3 replicas.*--uneven_batches"):
        trainer_of(workdir=str(tmp_path), devices=3, **EVEN)
    with pytest.raises(ConfigError, match="--global_batch_size=8 is not divisible"):
        trainer_of(devices=3, **EVEN)


def test_the_launcher_says_that_a_worker_is_left_out(monkeypatch, capsys):
    monkeypatch.setenv(exit_codes.LEFT_OUT, "0")
    with pytest.raises(ConfigError, match="--global_batch_size=8 is not divisible"):
        trainer_of(devices=3, **EVEN)
    monkeypatch.setenv(exit_codes.LEFT_OUT, "1")
    assert trainer_of(devices=3, **EVEN).fit(source(), steps=2)["replicas"] == 3
    assert "is not divisible by 3 replicas" in capsys.readouterr().out


def test_the_notice_counts_micro_batches_and_is_silent_where_all_divides():
    config = ExperimentConfig.from_flat_dict({"global_batch_size": 64, "accumulate_steps": 2})
    assert uneven_batches.uneven_notice(config, 4) == ""
    assert "is not divisible by 3 replicas x 2 micro-batches: this run continues with up to 11 examples for each" in (
        uneven_batches.uneven_notice(config, 3)
    )
    asked_for = ExperimentConfig.from_flat_dict({"global_batch_size": 64, "uneven_batches": True})
    assert uneven_batches.uneven_notice(asked_for, 3) == ""


def test_how_a_run_that_stops_can_go_on(tmp_path, capsys):
    with small_disk.mounted(tmp_path / "disk", kilobytes=2000) as disk:
        options = {"workdir": str(disk / "run"), "stop_after": 3, "schedule": "constant"}
        trainer_of(**options).fit(source(), steps=9)
        said = capsys.readouterr().out
        assert "stopped after step 3 of 9; the newest checkpoint is of step 3; start again to resume there\n" in said
        small_disk.fill(disk)
        trainer_of(**options).fit(source(), steps=9)
        said = capsys.readouterr().out
        assert "stopped after step 6 of 9; step 6 could not be saved, the newest checkpoint is of step 3; " in said
        assert checkpointer.Checkpointer(disk / "run", worker=1).steps() == [3]
    with small_disk.mounted(tmp_path / "tiny", kilobytes=8) as disk:
        trainer_of(**{**options, "workdir": str(disk)}).fit(source(), steps=9)
        assert "stopped after step 3 of 9; no checkpoint could be saved, so another start" in capsys.readouterr().out
    trainer_of(stop_after=3).fit(source(), steps=9)
    assert "stopped after step 3 of 9; without --workdir nothing is kept" in capsys.readouterr().out


def test_a_run_whose_checkpoints_cannot_be_listed_does_not_start_over(tmp_path, capsys):
    options = {"workdir": str(tmp_path), "stop_after": 2, "schedule": "constant"}
    closes = tfpar.Hook(1, lambda state: (tmp_path / "checkpoints").chmod(0o311))
    trainer = trainer_of(**options)
    (tmp_path / "checkpoints").mkdir()
    try:
        with permissions.binding():
            assert trainer.fit(source(), steps=4, hooks=[closes])["failed_checkpoints"] == []
            cannot = f"checkpoints in {tmp_path}/checkpoints cannot be listed (Permission denied)"
            assert f"stopped after step 2 of 4; the {cannot}" in capsys.readouterr().out
            with pytest.raises(CheckpointError, match=r"cannot be listed \(Permission denied\)"):
                trainer_of(**options)
    finally:
        (tmp_path / "checkpoints").chmod(0o755)
    trainer_of(**options).fit(source(), steps=4)
    assert "resumed from step 2" in capsys.readouterr().out


PROGRAM = """
from tfpar.process import exit_codes
from tfpar.guards.non_finite import BadStepsError
exit_codes.install_exit_code_hook()
exit_codes.install_exit_code_hook()
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code"), [("BadStepsError('NaN')", exit_codes.BAD_NUMBERS), ("ValueError('NaN')", 1)]
)
def test_numbers_that_went_bad_have_an_exit_code_in_any_script(error, code):
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", PROGRAM.format(error=error)]
    done = nursery.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1].endswith("Error: NaN")
