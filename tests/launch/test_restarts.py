"""When the launcher starts its workers again, after which delay, and on which ports."""

from __future__ import annotations

import re
import signal

from tests import nursery
from tests.launch.actors import SCRIPTS, Actors, lines_of
from tfpar.launch import cli as launch
from tfpar.process import exit_codes

import pytest

pytestmark = [pytest.mark.without_keras, pytest.mark.cluster]


def test_restart_on_fresh_ports(actors: Actors) -> None:
    result = actors.run(
        "--workers=2 --max_restarts=3 --restart_delay=0",
        "worker0=describe,touch:shown#,sleep:1",
        "worker1=wait_for:shown#,fail_until:2",
    )
    assert result.returncode == 0, result.stdout
    shown = lines_of(result.stdout, "worker 0")
    assert [line for line in shown if "RESTARTS" in line] == [f"TFPAR_RESTARTS={n}" for n in range(3)]
    assert len({line.partition(" at=")[2] for line in shown if " at=" in line}) == 3
    notes = lines_of(result.stdout, "launch")
    assert notes[:2] == [
        f"worker 1 failed with exit code 1 (ValueError: failing in start {n}); restart {n + 1} of 3" for n in range(2)
    ]
    assert notes[2].endswith("after 2 restarts")


@pytest.mark.parametrize("code", [exit_codes.USAGE_ERROR, exit_codes.BAD_NUMBERS, exit_codes.INTERRUPTED])
def test_final_exit_codes_are_not_retried(actors: Actors, code: int) -> None:
    result = actors.run("--workers=2 --max_restarts=3 --min_workers=1", f"all=exit:{code}")
    assert result.returncode == code
    (said,) = result.stdout.splitlines()
    assert re.fullmatch(rf"\[launch\] worker \d failed with exit code {code}", said)


def test_a_worker_that_ctrl_c_has_ended_is_not_started_again(actors: Actors) -> None:
    result = actors.run("--workers=1 --max_restarts=3", "worker0=kill:SIGINT")
    assert result.returncode == exit_codes.INTERRUPTED
    assert lines_of(result.stdout, "launch") == ["worker 0 was killed by SIGINT (exit code 130)"]


def test_delays_double_until_a_start_has_lasted() -> None:
    delays = launch.Delays(2.0)
    assert [delays.next(1.0) for _ in range(4)] == [2.0, 4.0, 8.0, 16.0]
    assert delays.next(launch._STABLE_RUN_S) == 2.0
    assert [delays.next(0.0) for _ in range(7)][-1] == launch._LONGEST_DELAY_S
    assert launch.Delays(100.0).next(0.0) == 100.0


def test_an_interrupt_during_the_delay_ends_the_launcher(actors: Actors) -> None:
    launcher = actors.start("--workers=1 --max_restarts=1 --restart_delay=60", "worker0=exit:3")
    assert launcher.stdout is not None
    assert "restart 1 of 1" in launcher.stdout.readline()
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=300)
    assert launcher.returncode == 130


def test_tensorflow_gets_another_port_where_its_own_was_taken(actors: Actors) -> None:
    """Real TensorFlow, end to end: the second start is no restart, and the workers then find each other."""
    script = [str(SCRIPTS / "all_reduce.py"), str(actors.folder / "marker")]
    result = actors.run("--workers=2 --grace_period=3", script=script, start=nursery.run)
    assert result.returncode == 0, result.stdout
    assert "worker 1 lost its port to another program" in result.stdout
    for index in range(2):
        assert "restarts=0 replicas=2 sum=3" in lines_of(result.stdout, f"worker {index}")
