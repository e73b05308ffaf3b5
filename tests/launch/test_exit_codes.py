"""The exit code of a launcher, and whom it blames, if several workers end for different reasons."""

from __future__ import annotations

import re
import signal

from tests.launch.actors import Actors, lines_of

import pytest

pytestmark = [pytest.mark.without_keras, pytest.mark.cluster]


def test_the_final_code_decides_whoever_ends_first(actors: Actors) -> None:
    """Workers whose run went bad end together, and a peer may stumble over the first of them."""
    result = actors.run(
        "--workers=2 --max_restarts=3 --min_workers=1", "worker0=touch:gone,exit:1", "worker1=wait_for:gone,exit:65"
    )
    assert result.returncode == 65
    assert lines_of(result.stdout, "launch") == ["worker 1 failed with exit code 65"]


def test_peer_loss_is_not_blamed(actors: Actors) -> None:
    result = actors.run("--workers=3", "worker0=exit:75", "worker2=sleep:0.5,exit:9", "worker1=sleep:900")
    assert result.returncode == 9
    assert lines_of(result.stdout, "launch") == ["worker 2 failed with exit code 9"]


def test_if_all_have_lost_another_the_first_one_counts(actors: Actors) -> None:
    result = actors.run("--workers=2", "all=exit:75")
    assert result.returncode == 75


def test_a_stopped_worker_is_killed_once_others_have_given_it_up(actors: Actors) -> None:
    result = actors.run("--workers=2 --grace_period=60", "worker0=kill:SIGSTOP", "worker1=sleep:0.5,exit:75")
    assert result.returncode == 128 + signal.SIGKILL
    assert lines_of(result.stdout, "launch") == [
        "worker 0 was stopped (SIGSTOP) and did not answer: killed",
        "worker 0 was stopped (SIGSTOP) and killed here (exit code 137)",
    ]


def test_preemption_is_said_as_such(actors: Actors) -> None:
    result = actors.run("--workers=2", "all=exit:85")
    assert result.returncode == 85
    assert re.fullmatch(r"worker \d was asked to end and did so \(exit code 85\)", lines_of(result.stdout, "launch")[0])


def test_sigterm_to_a_launcher_whose_workers_save(actors: Actors) -> None:
    launcher = actors.start(
        "--workers=2", "worker0=exit_when_told:85,touch:up0,sleep:900", "worker1=exit_when_told:85,touch:up1,sleep:900"
    )
    actors.wait_for_files("up0", "up1")
    launcher.terminate()
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 85, output
    assert "ended by SIGTERM; all processes were asked to end and did so (exit code 85)" in output


@pytest.mark.parametrize(
    ("handles", "code"), [("exit_when_told:75", 85), ("say:too early", 85), ("exit_when_told:4", 143)]
)
def test_sigterm_where_one_ends_in_another_way(actors: Actors, handles: str, code: int) -> None:
    """It noticed that a peer had gone, or could not handle the signal yet; anything else is no preemption."""
    launcher = actors.start(
        "--workers=2",
        "worker0=exit_when_told:85,touch:up0,sleep:900",
        f"worker1={handles},touch:up1,sleep:900",
    )
    actors.wait_for_files("up0", "up1")
    launcher.terminate()
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == code, output
