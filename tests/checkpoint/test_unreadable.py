"""Runs and workdirs that this process has no permission to read."""

from __future__ import annotations

from tests import permissions
from tests.training.trainers import trainer_of
from tfpar.checkpoint import run_state
from tfpar.checkpoint.checkpointer import Checkpoint, Checkpointer, CheckpointError
from tfpar.config import ConfigError

import keras
import pytest


def test_a_run_to_start_from_that_may_not_be_read_is_refused_in_one_line(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    run = tmp_path / "private" / "run"
    writer = Checkpointer(run)
    writer.save(Checkpoint(1, {}, {}, {}, {}))
    writer.close()
    (run / "model.keras").touch()
    for source in (run, run / "model.keras", run / "checkpoints" / "step-000000001"):
        with permissions.of(run.parent, 0):
            for look in (run_state.check_warm_start, lambda path: run_state.warm_start(model, path, print)):
                with pytest.raises(ConfigError, match=r"^--warm_start=.*private.* listed \(Permission denied\)"):
                    look(str(source))


def test_a_workdir_that_may_not_be_searched_is_refused_in_one_line(tmp_path):
    with permissions.of(tmp_path, 0), pytest.raises(CheckpointError, match=r"cannot be listed \(Permission denied\)"):
        trainer_of(workdir=str(tmp_path / "run"))
