"""What the launcher prints: whole lines with a prefix, log files, and a live line on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import struct
import termios

from tests.launch.actors import ACTOR, ROOT, Actors, lines_of
from tfpar.launch.console import Channel, Terminal

import pytest

pytestmark = [pytest.mark.without_keras, pytest.mark.cluster]


def test_lines_are_whole_prefixed_and_in_order(actors: Actors) -> None:
    result = actors.run("--workers=3", "all=write_in_pieces:300")
    assert result.returncode == 0, result.stdout
    for index in range(3):
        expected = [f"worker{index} line {n} {'x' * (n % 70)}" for n in range(300)]
        assert lines_of(result.stdout, f"worker {index}") == expected
    *_, last = result.stdout.splitlines()
    assert re.fullmatch(r"\[launch\] 3 workers: done in \d+\.\d s", last)


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
    (logs / "worker_1.log.gz").touch()
    assert actors.run(f"--workers=1 --log_dir={logs}", "all=say:alone").returncode == 0
    assert sorted(path.name for path in logs.iterdir()) == ["worker_0.log", "worker_1.log.gz"]


def test_log_files_that_somebody_removes_begin_again(actors: Actors) -> None:
    logs, script = actors.folder / "logs", actors.folder / "removes.py"
    script.write_text(f"import shutil, sys; print('hello', flush=True); shutil.rmtree({str(logs)!r}); sys.exit(3)")
    result = actors.run(f"--workers=1 --log_dir={logs} --max_restarts=1 --restart_delay=0", script=[str(script)])
    assert result.returncode == 3
    assert "worker 0 failed with exit code 3 after 1 restart" in result.stdout.splitlines()[-1]


def test_a_log_file_that_cannot_be_written_is_one_line(actors: Actors) -> None:
    taken = actors.folder / "logs" / "worker_0.log"
    taken.mkdir(parents=True)
    result = actors.run(f"--workers=1 --log_dir={taken.parent}", "all=say:hello")
    assert result.returncode == 2
    assert result.stdout == (
        f"error: --log_dir={taken.parent}: {taken} cannot be written (Is a directory). Name a writable directory.\n"
    )


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


def test_the_live_line_is_cut_by_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.BytesIO()
    Terminal(stream, is_tty=True, colours=False).live("worker 0", ("µ" * 50).encode() + b"\xff")
    assert stream.getvalue().decode() == "\r\x1b[K[worker 0] " + "µ" * 28


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
