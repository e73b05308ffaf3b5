"""Which checkpoint real workers resume from when only some of them find damage."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

from tests.integration.test_multi_worker import launch

import pytest

pytestmark = pytest.mark.cluster
CLASSIFY = "experiments/image_classification.py"
FLAGS = [
    *("--dataset=digits", "--model=mlp", "--optimizer=sgd", "--exchange=int4", "--global_batch_size=48"),
    *("--checkpoint_every=10", "--eval_every=1000", "--jit_compile=false"),
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> pathlib.Path:
    """A run of two workers, stopped after step 20."""
    workdir = tmp_path_factory.mktemp("stopped") / "run"
    result = launch(2, CLASSIFY, *FLAGS, "--steps=30", "--stop_after=20", f"--workdir={workdir}")
    assert result.returncode == 0, result.stdout
    assert sorted(path.name for path in (workdir / "checkpoints").glob("step-*")) == [
        "step-000000010",
        "step-000000020",
    ]
    return workdir


def truncate(path: pathlib.Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("workers", [2, 3])
def test_damage_that_one_worker_finds_takes_all_to_the_checkpoint_before(stopped, tmp_path, workers):
    workdir = pathlib.Path(shutil.copytree(stopped, tmp_path / "run"))
    truncate(workdir / "checkpoints" / "step-000000020" / "exchange-1.safetensors")
    result = launch(workers, CLASSIFY, *FLAGS, "--steps=30", f"--workdir={workdir}")
    assert result.returncode == 0, result.stdout
    assert re.search(r"resumed from step 10 ", result.stdout), result.stdout
    if workers == 2:  # worker 0 does not read that file
        assert (
            "[worker 0] WARNING: checkpoint of step 20 is damaged for worker 1; trying the one before it"
            in result.stdout
        )
        assert re.search(
            r"\[worker 1\] (WARNING: )?checkpoint of step 20 is damaged here \(exchange-1\.safeten", result.stdout
        )
    else:  # with another number of workers all count
        assert "[worker 0] WARNING: checkpoint of step 20 is damaged (exchange-1.safetensors" in result.stdout
    assert (workdir / "checkpoints" / "step-000000020.damaged").is_dir()
    assert json.loads((workdir / "summary.json").read_text())["steps"] == 30


def test_workers_that_find_no_whole_one_do_not_start_over(stopped, tmp_path):
    workdir = pathlib.Path(shutil.copytree(stopped, tmp_path / "run"))
    truncate(workdir / "checkpoints" / "step-000000020" / "exchange-1.safetensors")
    truncate(workdir / "checkpoints" / "step-000000010" / "exchange-0.safetensors")
    result = launch(2, CLASSIFY, *FLAGS, "--steps=30", f"--workdir={workdir}")
    assert result.returncode == 2, result.stdout
    assert re.search(r"every checkpoint in \S+ is damaged \(steps 10, 20\)", result.stdout)


def test_workers_that_go_on_without_a_codec_write_checkpoints(stopped, tmp_path):
    """They have residuals from the restored checkpoint on, not before."""
    workdir = pathlib.Path(shutil.copytree(stopped, tmp_path / "run"))
    result = launch(2, CLASSIFY, *FLAGS, "--exchange=none", "--steps=30", f"--workdir={workdir}")
    assert result.returncode == 0, result.stdout
    assert "applying the previous exchange's residual in the next step" in result.stdout
    assert "could not be written" not in result.stdout
    files = {path.name for path in (workdir / "checkpoints" / "step-000000030").iterdir()}
    assert {"exchange-0.safetensors", "exchange-1.safetensors"} <= files


def test_a_workdir_that_the_workers_do_not_share_is_refused(stopped, tmp_path):
    # Each worker runs in a directory of its own, and takes the same relative path for another place.
    script = tmp_path / "apart.py"
    script.write_text(
        "import json, os, runpy, sys\n"
        "index = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        f"os.makedirs(f'{tmp_path}/{{index}}', exist_ok=True)\n"
        f"os.chdir(f'{tmp_path}/{{index}}')\n"
        f"sys.argv[0] = {str(pathlib.Path(CLASSIFY).resolve())!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    shutil.copytree(stopped, tmp_path / "0" / "run")
    result = launch(2, str(script), *FLAGS, "--steps=30", "--workdir=run")
    assert result.returncode == 2, result.stdout
    assert "the workers find different checkpoints in run/checkpoints" in result.stdout
    assert (tmp_path / "0" / "run" / "checkpoints" / "step-000000020").is_dir()
