"""A launcher and its processes end together, whoever ends first, and none is left behind."""

from __future__ import annotations

import os
import signal
import time

from tests.launch.actors import Actors, lines_of

import pytest

pytestmark = [pytest.mark.without_keras, pytest.mark.cluster]


def test_one_failure_ends_all_and_gives_its_code(actors: Actors) -> None:
    # Whoever waited for the others would run into the time limit of a test.
    result = actors.run(
        "--workers=3",
        "worker0=spawn:900,touch:up,sleep:900",
        "worker1=wait_for:up,wait_for:up2,exit:3",
        "worker2=touch:up2,sleep:900",
    )
    assert result.returncode == 3
    assert result.stdout.splitlines()[-1] == "[launch] worker 1 failed with exit code 3"
    assert actors.pids().keys() == {"worker0", "worker0-child", "worker1", "worker2"}
    assert actors.alive() == []


def test_an_exception_is_named_in_the_last_line(actors: Actors) -> None:
    result = actors.run("--workers=2", "worker1=fail_until:9", "worker0=sleep:900")
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == (
        "[launch] worker 1 failed with exit code 1 (ValueError: failing in start 0)"
    )


def test_killed_by_a_signal(actors: Actors) -> None:
    result = actors.run("--workers=2", "worker0=sleep:900", "worker1=kill:SIGSEGV")
    assert result.returncode == 128 + signal.SIGSEGV
    assert result.stdout.splitlines()[-1] == "[launch] worker 1 was killed by SIGSEGV (exit code 139)"


def test_killing_one_from_outside_ends_all(actors: Actors) -> None:
    launcher = actors.start("--workers=2", "all=sleep:900")
    os.kill(actors.wait_for(2)["worker1"], signal.SIGKILL)
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 137
    assert "worker 1 was killed by SIGKILL" in output.splitlines()[-1]
    assert actors.alive() == []


def test_a_process_that_does_not_listen_is_killed_after_the_grace_period(actors: Actors) -> None:
    started = time.monotonic()
    result = actors.run(
        "--workers=2 --grace_period=0.5", "worker0=ignore:SIGTERM,touch:up,sleep:900", "worker1=wait_for:up,exit:4"
    )
    assert result.returncode == 4
    assert time.monotonic() - started > 0.5
    assert actors.alive() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(actors: Actors, number: signal.Signals) -> None:
    launcher = actors.start("--workers=2", f"all=catch:{number.name},spawn:900,sleep:900")
    actors.wait_for(4)
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 128 + number
    assert output.count(f"caught {number.name}") == 2
    assert output.splitlines()[-1] == f"[launch] ended by {number.name}; all processes have ended"
    assert actors.alive() == []


def test_a_closed_terminal_leaves_time_to_save(actors: Actors) -> None:
    """The shell and the system may each send a SIGHUP, which is no second interrupt."""
    launcher = actors.start("--workers=1 --grace_period=60", "worker0=save_when_told:85,touch:up,sleep:900")
    actors.wait_for_files("up")
    for _ in range(2):
        launcher.send_signal(signal.SIGHUP)
        time.sleep(0.2)
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 85, output
    assert "ended by SIGHUP; all processes were asked to end and did so (exit code 85)" in output


def test_the_chief_saves_before_its_servers_are_ended(actors: Actors) -> None:
    launcher = actors.start(
        "--workers=1 --ps=1 --grace_period=60",
        "chief=save_when_told:85,touch:chief,sleep:900",
        "worker=touch:worker,sleep:900",
        "ps=touch:ps,sleep:900",
    )
    actors.wait_for_files("chief", "worker", "ps")
    launcher.terminate()
    output, _ = launcher.communicate(timeout=300)
    assert lines_of(output, "chief 0") == ["saved beside ps0 worker0"]
    assert launcher.returncode == 85, output
    assert actors.alive() == []


def test_a_second_interrupt_kills_at_once(actors: Actors) -> None:
    launcher = actors.start("--workers=2 --grace_period=60", "all=ignore:SIGINT,say:up,spawn:900,sleep:900")
    actors.wait_for(4)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=300)
    assert launcher.returncode == 130
    assert actors.alive() == []


def test_nothing_survives_a_killed_launcher(actors: Actors) -> None:
    launcher = actors.start("--workers=2", "all=ignore:SIGTERM,spawn:900,sleep:900")
    actors.wait_for(4)
    launcher.kill()
    assert actors.alive() == []
    launcher.communicate(timeout=300)


def test_nothing_survives_when_the_reader_goes_away(actors: Actors) -> None:
    launcher = actors.start("--workers=2", "worker0=say:first,wait_for:gone,say:second,sleep:900", "worker1=sleep:900")
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "[worker 0] first\n"
    launcher.stdout.close()
    (actors.folder / "gone").touch()
    assert launcher.wait(timeout=300) == 128 + signal.SIGPIPE
    assert actors.alive() == []


def test_the_end_of_the_chief_ends_servers(actors: Actors) -> None:
    """Workers and parameter servers of TensorFlow never end by themselves."""
    result = actors.run("--workers=2 --ps=1", "chief=say:trained,exit:0", "ps=sleep:900", "worker=sleep:900")
    assert result.returncode == 0
    assert lines_of(result.stdout, "chief 0") == ["trained"]
    assert result.stdout.splitlines()[-1].startswith("[launch] 1 chief, 2 workers, 1 ps: done")
    assert actors.alive() == []


def test_workers_may_finish_after_the_chief(actors: Actors) -> None:
    result = actors.run("--workers=1 --ps=1", "chief=exit:0", "ps=sleep:900", "worker=sleep:0.5,say:saved,exit:0")
    assert (result.returncode, lines_of(result.stdout, "worker 0")) == (0, ["saved"])


def test_a_failing_parameter_server_is_a_failure(actors: Actors) -> None:
    result = actors.run("--workers=1 --ps=1", "chief=sleep:900", "worker=sleep:900", "ps=exit:5")
    assert result.returncode == 5
    assert result.stdout.splitlines()[-1] == "[launch] ps 0 failed with exit code 5"
