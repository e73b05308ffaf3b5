"""One job writes a workdir: real processes, real locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time

from tfpar.checkpoint import workdir_lock
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.training.validate import validate_workdir

import pytest

pytestmark = pytest.mark.without_keras


# Holds the lock of its argument until its input ends, as a job that is running.
HOLD = """
import sys
from tfpar.checkpoint import workdir_lock
with workdir_lock.lock_workdir(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""
CLUSTER = {"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}}


def tf_config(index: int, restarts: int = 0) -> dict[str, str]:
    return {
        "TF_CONFIG": json.dumps({**CLUSTER, "task": {"type": "worker", "index": index}}),
        "TFPAR_RESTARTS": str(restarts),
    }


@contextlib.contextmanager
def job(workdir, **environ: str):
    """Another process that holds the lock; yields it and what it said before it had it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(workdir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    ) as process:
        try:
            said = []
            while (line := process.stdout.readline().strip()) != "held":
                assert line, "the holder ended"
                said.append(line)
            yield process, said
        finally:
            process.kill()


def test_the_second_is_refused_and_told_who_the_first_is(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_lock, "WAIT_SECONDS", 0.2)
    config = ExperimentConfig.from_flat_dict({"workdir": str(tmp_path), "steps": 1})
    with job(tmp_path, SLURM_JOB_ID="4711") as (first, said):
        assert not said
        for attempt in (
            lambda: validate_workdir(config),
            lambda: workdir_lock.lock_workdir(str(tmp_path)).__enter__(),
        ):
            with pytest.raises(ConfigError) as caught:
                attempt()
            message = str(caught.value)
            assert f"--workdir={tmp_path} is in use by process {first.pid} on {os.uname().nodename}, user " in message
            assert "Slurm job 4711" in message
            assert "another --workdir" in message
        first.stdin.close()
        first.wait()
    validate_workdir(config)


def test_a_killed_owner_is_noticed_and_its_workdir_taken_over(tmp_path, messages):
    with job(tmp_path) as (first, _):
        first.kill()
        first.wait()
        with job(tmp_path) as (_, said):  # the third, after a refused second
            assert len(said) == 1
            assert f"took over a stale lock left by process {first.pid} " in said[0]
        with workdir_lock.lock_workdir(str(tmp_path)):
            assert len(messages) == 1
    with workdir_lock.lock_workdir(str(tmp_path)):
        assert len(messages) == 1  # it was given back in between


def test_an_owner_that_is_just_ending_is_waited_for(tmp_path):
    with job(tmp_path) as (first, _):
        ended_at = time.monotonic() + 1.0
        killer = subprocess.Popen(["/bin/sh", "-c", f"sleep 1; kill -9 {first.pid}"])
        with workdir_lock.lock_workdir(str(tmp_path)):
            assert time.monotonic() > ended_at - 0.2
        killer.wait()


def test_an_owner_on_another_machine_is_waited_for_longer_and_that_is_said(tmp_path, monkeypatch, messages):
    monkeypatch.setattr(workdir_lock, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(workdir_lock, "WAIT_FOR_ANOTHER_MACHINE_SECONDS", 0.5)
    with job(tmp_path), pytest.raises(ConfigError, match="in use by"):
        workdir_lock.lock_workdir(str(tmp_path)).__enter__()
    assert not messages
    with job(tmp_path):
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        began = time.monotonic()
        with pytest.raises(ConfigError, match="in use by"):
            workdir_lock.lock_workdir(str(tmp_path)).__enter__()
        assert time.monotonic() - began >= 0.5
    [line] = messages
    assert "waiting up to 0 s for it to end" in line


def test_the_other_workers_of_the_same_job_are_not_refused(tmp_path, monkeypatch):
    config = ExperimentConfig.from_flat_dict({"workdir": str(tmp_path), "steps": 1})
    monkeypatch.setattr(workdir_lock, "WAIT_SECONDS", 0.0)
    with job(tmp_path, **tf_config(0)):
        for name, value in tf_config(1).items():
            monkeypatch.setenv(name, value)
        validate_workdir(config)
        monkeypatch.setenv("TFPAR_RESTARTS", "1")  # of another start, which the chief of the old one is in the way of
        with pytest.raises(ConfigError, match="in use by"):
            workdir_lock.check_free(str(tmp_path), wait=0.2)
        monkeypatch.delenv("TF_CONFIG")
        with pytest.raises(ConfigError, match="in use by"):
            workdir_lock.check_free(str(tmp_path), wait=0.2)


def test_single_processes_are_different_jobs(tmp_path):
    with job(tmp_path), pytest.raises(ConfigError, match="in use by"):
        workdir_lock.check_free(str(tmp_path), wait=0.2)


def test_one_fit_after_the_other_in_one_process(tmp_path, messages):
    for _ in range(2):
        with workdir_lock.lock_workdir(str(tmp_path / "new")):
            workdir_lock_file = tmp_path / "new" / workdir_lock.NAME
            assert json.loads(workdir_lock_file.read_text())["pid"] == os.getpid()
        with pytest.raises(ZeroDivisionError), workdir_lock.lock_workdir(str(tmp_path / "new")):
            raise ZeroDivisionError
    assert not messages
    assert not workdir_lock_file.read_text().strip()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "x", "host": 3, "job": null}', "\0" * 100])
def test_whatever_the_file_holds_the_kernel_decides(tmp_path, content):
    (tmp_path / workdir_lock.NAME).write_text(content)
    workdir_lock.check_free(str(tmp_path))
    with workdir_lock.lock_workdir(str(tmp_path)):
        (tmp_path / workdir_lock.NAME).write_text(content)
        with pytest.raises(ConfigError, match="in use by"):
            workdir_lock.check_free(str(tmp_path), wait=0.0)


# File systems without locks: there is none here, so the system call is made to say what it says there.


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_locks_a_living_process_of_this_machine_keeps_others_off(tmp_path, no_locks, messages):
    with workdir_lock.lock_workdir(str(tmp_path)):
        assert "has no locks" in messages[0]
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} "):
            workdir_lock.check_free(str(tmp_path), wait=0.0)
        with pytest.raises(ConfigError, match="in use by"):
            workdir_lock.lock_workdir(str(tmp_path), wait=0.0).__enter__()
    workdir_lock.check_free(str(tmp_path), wait=0.0)


def test_without_locks_an_owner_that_is_gone_is_recognised_and_one_elsewhere_is_named(tmp_path, no_locks, messages):
    path = tmp_path / workdir_lock.NAME
    me = {"host": os.uname().nodename, "pid": os.getpid(), "began": 1}  # another process once had this number
    path.write_text(json.dumps(me))
    workdir_lock.check_free(str(tmp_path), wait=0.0)
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "began": 5}))
    workdir_lock.check_free(str(tmp_path), wait=0.0)
    with workdir_lock.lock_workdir(str(tmp_path), wait=0.0):
        assert "WARNING: the file system of" in messages[0]
        assert "may still be in use by process 7 on elsewhere" in messages[1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [workdir_lock.NAME]
