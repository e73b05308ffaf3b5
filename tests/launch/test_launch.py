"""tfpar.launch with real processes: output, ends, restarts, signals, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import nursery
from tfpar.launch import cli as launch
from tfpar.launch import gpu_slots
from tfpar.launch.console import Channel, Terminal
from tfpar.process import exit_codes

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "integration" / "scripts"
ACTOR = str(SCRIPTS / "actor.py")

pytestmark = [pytest.mark.without_keras, pytest.mark.cluster]


class Actors:
    """Starts the launcher on actor.py, and knows all processes that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            **{
                name: value
                for name, value in os.environ.items()
                if name not in ("TF_CONFIG", "NO_COLOR", "COLUMNS", "LINES")
            },
            "ACTOR_DIR": str(folder),
            "PYTHONPATH": str(ROOT),
        }

    def command(self, flags: str, script: list[str]) -> list[str]:
        return [sys.executable, "-m", "tfpar.launch", *flags.split(), "--", *script]

    def start(self, flags: str, *acts: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(flags, [ACTOR, *acts]),
            cwd=ROOT,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(
        self, flags: str, *acts: str, script: list[str] | None = None, start: Any = subprocess.run
    ) -> subprocess.CompletedProcess[str]:
        return start(
            self.command(flags, [ACTOR, *acts] if script is None else script),
            cwd=ROOT,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )

    def wait_for(self, count: int) -> dict[str, int]:
        """Task name to process number, once that many have started."""
        deadline = time.monotonic() + 300
        while len(found := self.pids()) < count:
            assert time.monotonic() < deadline, f"{count} processes wanted, {found} started"
            time.sleep(0.02)
        return found

    def wait_for_files(self, *names: str) -> None:
        """Returns once the actors have touched all of these."""
        deadline = time.monotonic() + 300
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, f"{names} wanted, {os.listdir(self.folder)} found"
            time.sleep(0.02)

    def pids(self) -> dict[str, int]:
        parts = (path.name.split(".") for path in self.folder.glob("*.pid"))
        return {task: int(pid) for pid, task, _ in parts}

    def alive(self, wait: float = 30.0) -> list[str]:
        """Who still runs after this many seconds."""
        deadline = time.monotonic() + wait
        while running := [task for task, pid in self.pids().items() if _runs(pid)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return running


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def actors(tmp_path: Path) -> Iterator[Actors]:
    made = Actors(tmp_path)
    yield made
    left = made.alive(wait=0)
    for pid in made.pids().values():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert left == [], f"left behind: {left}"


def lines_of(output: str, label: str) -> list[str]:
    prefix = f"[{label}] "
    return [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]


# Output.


def test_lines_are_whole_prefixed_and_in_order(actors: Actors) -> None:
    result = actors.run("--workers=3", "all=write_in_pieces:300")
    assert result.returncode == 0, result.stdout
    for index in range(3):
        expected = [f"worker{index} line {n} {'x' * (n % 70)}" for n in range(300)]
        assert lines_of(result.stdout, f"worker {index}") == expected
    *_, last = result.stdout.splitlines()
    assert re.fullmatch(r"\[launch\] 3 workers: done in \d+\.\d s", last)


def test_every_process_knows_its_place(actors: Actors) -> None:
    result = actors.run(
        "--workers=2 --ps=1",
        "all=describe",
        "ps=touch:shown,sleep:900",
        "chief=wait_for:shown",
        "worker=wait_for:shown",
    )
    assert result.returncode == 0, result.stdout
    members = "1 chief, 2 worker, 1 ps (TF_CONFIG)"
    for label, rank, is_chief in (
        ("chief 0", 0, True),
        ("worker 0", 1, False),
        ("worker 1", 2, False),
        ("ps 0", -1, False),
    ):
        place, restarts, *_ = lines_of(result.stdout, label)
        assert place.startswith(f"{label} of {members} rank={rank} chief={is_chief} at=127.0.0.1:")
        assert restarts == "TFPAR_RESTARTS=0"


def test_cores_are_shared_out_unless_the_user_says_otherwise(actors: Actors) -> None:
    cores = len(os.sched_getaffinity(0))
    result = actors.run("--workers=2", "worker0=describe")
    assert f"TF_NUM_INTRAOP_THREADS={max(1, cores // 2)}" in lines_of(result.stdout, "worker 0")
    actors.environ["TF_NUM_INTRAOP_THREADS"] = "7"
    result = actors.run("--workers=2", "worker0=describe")
    assert "TF_NUM_INTRAOP_THREADS=7" in lines_of(result.stdout, "worker 0")


def test_gpus_are_shared_out(actors: Actors) -> None:
    actors.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7,8"
    result = actors.run("--workers=2 --ps=1", "all=describe", "ps=touch:shown,sleep:900", "chief=wait_for:shown")
    seen = {label: lines_of(result.stdout, label)[-1] for label in ("chief 0", "worker 0", "worker 1", "ps 0")}
    assert [value.partition("=")[2] for value in seen.values()] == ["-1", "4,5", "6,7", "-1"]
    actors.environ["CUDA_VISIBLE_DEVICES"] = "0"
    result = actors.run("--workers=2", "all=describe")
    assert "training on the CPU" in result.stdout
    assert lines_of(result.stdout, "worker 1")[-1] == "CUDA_VISIBLE_DEVICES=-1"


def test_log_dir_keeps_each_process_apart(actors: Actors) -> None:
    logs = actors.folder / "logs"
    result = actors.run(
        f"--workers=2 --log_dir={logs} --max_restarts=1 --restart_delay=0", "all=say:hello", "worker1=exit:3"
    )
    assert result.returncode == 3
    assert (logs / "worker_1.log").read_text().splitlines() == ["hello", "hello"]
    assert result.stdout.splitlines()[-1] == (
        f"[launch] worker 1 failed with exit code 3 after 1 restart; log: {logs / 'worker_1.log'}"
    )
    assert actors.run(f"--workers=2 --log_dir={logs}", "all=say:again").returncode == 0
    assert (logs / "worker_1.log").read_text() == "again\n"  # a new run starts new logs


def test_module_instead_of_script(actors: Actors) -> None:
    actors.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SCRIPTS)])
    result = actors.run("--workers=1", script=["-m", "actor", "worker0=say:from a module"])
    assert (result.returncode, lines_of(result.stdout, "worker 0")) == (0, ["from a module"])


class Tty:
    """The launcher on a pseudo-terminal; `screen` renders what a person sees."""

    def __init__(self, command: list[str], environ: dict[str, str], columns: int) -> None:
        pid, self.master = pty.fork()
        if pid == 0:  # pragma: no cover - the child
            os.chdir(ROOT)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            os.execve(command[0], command, {**environ, "TERM": "xterm"})
        self.data = b""
        with contextlib.suppress(OSError):  # how the end reads on Linux
            while select.select([self.master], [], [], 30)[0] and (piece := os.read(self.master, 4096)):
                self.data += piece
        os.close(self.master)
        self.code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def screen(self) -> list[str]:
        lines, column = [""], 0
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.data.decode()):
            if token == "\n":
                lines.append("")
                column = 0
            elif token == "\r":
                column = 0
            elif token == "\x1b[K":
                lines[-1] = lines[-1][:column]
            elif not token.startswith("\x1b"):
                lines[-1] = lines[-1][:column] + token + lines[-1][column + len(token) :]
                column += len(token)
        return [line for line in lines if line]


def test_live_progress_survives_on_a_terminal(actors: Actors) -> None:
    seen = Tty(
        actors.command("--workers=2", [ACTOR, "worker0=progress:20", "worker1=sleep:0.4,say:note,progress:3"]),
        actors.environ,
        columns=60,
    )
    assert seen.code == 0
    frames = re.findall(rb"step (\d+) of 20, (\d+) columns", seen.data)
    assert len({step for step, _ in frames}) >= 10  # shown while it ran, not at the end
    assert frames[-1][1] == b"49"  # the terminal's 60 less the prefix, so that the line does not wrap
    screen = seen.screen()
    assert screen[:-1].count("[worker 1] note") == 1
    assert [line for line in screen if "worker 0" in line] == ["[worker 0] trained"]
    assert "of 3" not in seen.data.decode()  # only the chief has a live line
    assert b"\x1b[36m[worker 0]\x1b[0m " in seen.data


def test_live_progress_elsewhere_is_its_last_state(actors: Actors) -> None:
    result = actors.run("--workers=1", "worker0=progress:5")
    assert lines_of(result.stdout, "worker 0") == ["trained\x1b[K"]


def feed(pieces: list[bytes], *, is_tty: bool = False) -> str:
    stream = io.BytesIO()
    channel = Channel(Terminal(stream, is_tty=is_tty, colours=False), "worker 0")
    for piece in pieces:
        channel.feed(piece)
    channel.close()
    return stream.getvalue().decode()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a", b"b\nc", b"\n"], ["ab", "c"]),
        ([b"no newline at the end"], ["no newline at the end"]),
        ([b"windows\r\n", b"split\r", b"\n"], ["windows", "split"]),
        ([b"\r10%", b"\r20%", b"\rdone\n"], ["done"]),
        ([b"10%\r", b"20%\r", b"\n"], ["20%"]),
        ([b"\r10%", b" more\n"], ["10% more"]),
        ([b"\n\nx\n"], ["", "", "x"]),
        ([b"\xff\xfe\n"], None),
        ([b"x" * (3 << 19), b"x" * (3 << 19)], ["x" * (3 << 19), "x" * (3 << 19)]),
    ],
)
def test_cutting_into_lines(pieces: list[bytes], expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises(UnicodeDecodeError):  # bytes go through as they are
            feed(pieces)
        return
    assert feed(pieces) == "".join(f"[worker 0] {line}\n" for line in expected)


# Ends.


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


# Restarts.


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


@pytest.mark.parametrize("code", [exit_codes.USAGE_ERROR, exit_codes.BAD_NUMBERS])
def test_final_exit_codes_are_not_retried(actors: Actors, code: int) -> None:
    result = actors.run("--workers=2 --max_restarts=3 --min_workers=1", f"all=exit:{code}")
    assert result.returncode == code
    (said,) = result.stdout.splitlines()
    assert re.fullmatch(rf"\[launch\] worker \d failed with exit code {code}", said)


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


def test_a_worker_that_keeps_failing_is_left_out(actors: Actors) -> None:
    result = actors.run("--workers=3 --min_workers=2 --max_restarts=5 --restart_delay=0", "worker2=exit:4")
    assert result.returncode == 0, result.stdout
    said = lines_of(result.stdout, "launch")
    assert said[0] == "worker 2 failed with exit code 4; restart 1 of 5"
    assert said[1] == "worker 2 failed with exit code 4; restart 2 of 5"
    assert said[2] == "continuing with 2 workers, without worker 2"
    assert said[3].startswith("2 workers: done in ")


def test_the_failing_gpu_is_no_longer_used(actors: Actors) -> None:
    actors.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"
    result = actors.run("--workers=4 --min_workers=2 --max_restarts=5 --restart_delay=0", "all=fail_on_gpu:5,describe")
    assert result.returncode == 0, result.stdout
    last = [line for line in result.stdout.splitlines() if "CUDA_VISIBLE" in line][-3:]
    assert {tuple(re.findall(r"worker (\d).*=(\d)", line)[0]) for line in last} == {("0", "4"), ("1", "6"), ("2", "7")}
    said = lines_of(result.stdout, "launch")
    assert said[2] == "continuing with 3 workers, without worker 1 (GPU 5); workers 2 to 3 are now workers 1 to 2"
    assert said[3].startswith("3 workers: done in ")


def test_the_processes_know_that_one_is_left_out(actors: Actors) -> None:
    result = actors.run(
        "--workers=2 --min_workers=1 --max_restarts=5 --restart_delay=0",
        "worker0=show:TFPAR_LEFT_OUT",
        "worker1=exit:4",
    )
    assert lines_of(result.stdout, "worker 0") == ["TFPAR_LEFT_OUT=0", "TFPAR_LEFT_OUT=0", "TFPAR_LEFT_OUT=1"]


def test_what_happens_to_several_is_no_workers_fault(actors: Actors) -> None:
    result = actors.run(
        "--workers=3 --min_workers=1 --max_restarts=3 --restart_delay=0",
        "worker0=sleep:900",
        "worker1=exit:4",  # always the first
        "worker2=sleep:0.3,exit:4",
    )
    assert result.returncode == 4
    assert "continuing with" not in result.stdout


def test_no_fewer_than_min_workers(actors: Actors) -> None:
    result = actors.run("--workers=2 --min_workers=2 --max_restarts=3 --restart_delay=0", "worker1=exit:4")
    assert result.returncode == 4
    assert "continuing with" not in result.stdout


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


# Before anything starts.


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--workers=N"),
        (["--workers=0", "--", ACTOR], "--workers=0 must be at least 1"),
        (["--workers=two", "--", ACTOR], "--workers=two is not a whole number; give one, as in --workers=2."),
        (["--workers=1", "--grace_period=long", "--", ACTOR], "--grace_period=long is not a number; give one"),
        (["--workers=1", "--ps=-1", "--", ACTOR], "--ps=-1 must be at least 0"),
        (["--workers=1", "--restart_delay=nan", "--", ACTOR], "--restart_delay=nan must be at least 0"),
        (["--worker=1", "--", ACTOR], "unknown argument --worker. Did you mean --workers?"),
        (["--workers=1", ACTOR], f"put -- before the script: python -m tfpar.launch --workers=1 -- {ACTOR}"),
        (["--workers=1", "train.py", "--steps=3"], "python -m tfpar.launch --workers=1 -- train.py --steps=3"),
        (["--workers=1", "--"], "no script"),
        (["--workers=1", "--", ACTOR.replace("actor", "actr")], "Did you mean"),
        (["--workers=1", "--", "--steps=3"], "the script must come first"),
        (["--workers=1", "--", "-m"], "name of a module"),
        (["--workers=1", "--", "-m", "no_such_package.train"], "no module named 'no_such_package'"),
    ],
)
def test_usage_errors(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch.main(arguments)
    shown = capsys.readouterr()
    assert caught.value.code == 2
    assert shown.err.startswith("error: ")
    assert expected in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch.main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for text in ("--workers", "--max_restarts", "TFPAR_RESTARTS", "examples:"):
        assert text in shown


def test_free_ports_can_be_bound() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = launch.free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < first_ephemeral  # where no outgoing connection can take one
    for port in ports:
        with socket.socket() as server:
            server.bind(("", port))
            server.listen()


@pytest.mark.parametrize(
    ("workers", "gpus", "expected"),
    [
        (2, [], []),
        (2, ["0", "1"], ["0", "1"]),
        (2, ["0", "1", "2", "3", "4"], ["0,1", "2,3"]),
        (1, ["0", "1"], ["0,1"]),
        (2, ["0"], ["-1", "-1"]),
    ],
)
def test_share_gpus(workers: int, gpus: list[str], expected: list[str]) -> None:
    assert gpu_slots.share_gpus(workers, gpus) == expected


@pytest.mark.parametrize(("value", "expected"), [("", []), ("-1", []), ("0,1", ["0", "1"]), ("2,-1,3", ["2"])])
def test_visible_gpus(value: str, expected: list[str]) -> None:
    assert gpu_slots.visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == expected


# Who is left out.


def four(least: int = 1) -> gpu_slots.Slots:
    return gpu_slots.Slots(4, list("0123"), least=least)


def test_the_suspects_slot_is_left_out_with_its_gpu() -> None:
    workers = four()
    assert workers.failed(1, 5.0, alone=True) == ""
    assert workers.failed(1, 5.0, alone=True).startswith("continuing with 3 workers, without worker 1 (GPU 1)")
    assert (workers.gpus, workers.workers, workers.left_out) == (["0", "2", "3"], 3, 1)
    assert workers.failed(1, 5.0, alone=True) == ""  # another slot by now
    assert workers.failed(1, 5.0, alone=True).endswith("without worker 1 (GPU 2); worker 2 is now worker 1")
    assert workers.gpus == ["0", "3"]


def test_unrelated_failures_leave_nobody_out() -> None:
    workers = four()
    for worker, ran, alone in ((1, 5.0, True), (1, gpu_slots.TRUSTED_S, True), (2, 5.0, True), (1, 5.0, True)):
        assert workers.failed(worker, ran, alone=alone) == ""
    assert workers.failed(1, 5.0, alone=False) == ""
    assert workers.workers == 4


def test_enough_workers_stay() -> None:
    workers = four(least=4)
    assert [workers.failed(3, 5.0, alone=True) for _ in range(3)] == [""] * 3
    workers = four(least=0)
    assert [workers.failed(3, 5.0, alone=True) for _ in range(3)] == [""] * 3


def test_left_out_without_gpus() -> None:
    workers = gpu_slots.Slots(2, [], least=1)
    assert workers.gpus == []
    said = [workers.failed(1, 5.0, alone=True) for _ in range(2)]
    assert said == ["", "continuing with 1 worker, without worker 1"]
    assert (workers.gpus, workers.workers) == ([], 1)
