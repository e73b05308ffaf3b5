"""Processes that end together: started in separate process groups, read by one loop, and never left running.

A single thread does everything - reading output, detecting exits, reacting to signals - so that lines cannot mix,
and forking is safe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import os
import selectors
import shutil
import signal
import struct
import subprocess
import termios
import time
import tty
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tfpar.launch import log_files
from tfpar.launch.console import Channel, Terminal
from tfpar.launch.guard import Guard
from tfpar.launch.interrupts import Interrupts
from tfpar.process.exit_codes import PREEMPTED
from tfpar.process.safe_write import shortened

_KILL_WAIT_S = 10.0  # SIGKILL is certain, but a process in an uninterruptible system call ends only after that
_PIPE_WAIT_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A process to start.

    Attributes:
      label: Its name, which prefixes its lines: `worker 0`.
      arguments: Program and arguments.
      environ: All its environment variables.
      log: File that its output is written to as well.
      live: Whether it may show a live progress line where the launcher is on a terminal.
      cores: Numbers of the cores that it may use; by default those of the launcher.
    """

    label: str
    arguments: Sequence[str]
    environ: dict[str, str]
    log: Path | None = None
    live: bool = False
    cores: Sequence[int] = ()


@dataclasses.dataclass
class Process:
    """A started process.

    Attributes:
      command: Its command line.
      popen: The process.
      output: The end of a pipe or pseudo-terminal from which its output is read; -1 once that is closed.
      channel: Where its output goes.
      code: None while it runs, then its exit code, negative for a signal.
      was_stopped: Whether it was stopped (SIGSTOP), and killed for that by this program.
    """

    command: Command
    popen: subprocess.Popen[bytes]
    output: int
    channel: Channel
    code: int | None = None
    was_stopped: bool = False

    @property
    def label(self) -> str:
        """The command's."""
        return self.command.label

    @property
    def exit_code(self) -> int:
        """As a shell reports it: 128 + N for signal N."""
        assert self.code is not None
        return self.code if self.code >= 0 else 128 - self.code

    def how_it_ended(self) -> str:
        """`failed with exit code 3 (ValueError: ...)`, or the signal that killed it."""
        assert self.code is not None
        if self.code == PREEMPTED:
            return f"was asked to end and did so (exit code {PREEMPTED})"
        if self.was_stopped:
            return f"was stopped (SIGSTOP) and killed here (exit code {self.exit_code})"
        if self.code >= 0:
            reason = self.channel.last_error()
            return f"failed with exit code {self.code}" + (f" ({shortened(reason)})" if reason else "")
        name = signal.Signals(-self.code).name if -self.code in set(signal.Signals) else f"signal {-self.code}"
        hint = "; if nobody did that, the machine may have run out of memory" if name == "SIGKILL" else ""
        return f"was killed by {name} (exit code {self.exit_code}{hint})"


class Supervisor:
    """Starts processes that belong together, passes their output on, and ends them together.

    Attributes:
      processes: In the order started.
    """

    def __init__(self, terminal: Terminal, interrupts: Interrupts, guard: Guard) -> None:
        self.processes: list[Process] = []
        self._failures: list[Process] = []
        self._terminal = terminal
        self._interrupts = interrupts
        self._guard = guard
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(interrupts.wakeup, selectors.EVENT_READ)

    def start(self, command: Command) -> None:
        """Starts a process. Its standard error goes the way of its output, in the order written.

        Raises:
          ConfigError: Its log cannot be opened.
        """
        log = log_files.opened(command.log) if command.log else None
        if command.live and self._terminal.is_tty:
            # The process sees a terminal, narrower by the prefix, and so shows its progress line.
            output, stdout = os.openpty()
            tty.setraw(stdout)
            _set_size(output, command.label)
        else:
            output, stdout = os.pipe()
        try:
            popen = subprocess.Popen(
                command.arguments,
                env=command.environ,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(_prepare, self._guard.join(), command.cores),
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(stdout)
        process = Process(command, popen, output, Channel(self._terminal, command.label, log, live=command.live))
        self.processes.append(process)
        self._selector.register(output, selectors.EVENT_READ, process)

    def wait(self, labels: Iterable[str], timeout: float | None = None) -> None:
        """Forwards output until these processes have ended, any process has failed, or a signal has arrived.

        Args:
          labels: The processes that must end.
          timeout: Seconds; None for no limit.
        """
        awaited = [process for process in self.processes if process.label in set(labels)]
        self._pump(
            lambda: bool(
                self.failed
                or self._interrupts.received
                or self._terminal.broken
                or all(process.code is not None for process in awaited)
            ),
            timeout,
        )

    @property
    def failed(self) -> Process | None:
        """The first that ended with a code other than 0, by itself and not by `stop`."""
        return self._failures[0] if self._failures else None

    def settle(self, timeout: float) -> None:
        """Forwards output for a while, so that processes can end by themselves after one has failed.

        Args:
          timeout: Seconds at most.
        """
        self._pump(lambda: self._ended() or bool(self._interrupts.received), timeout)

    def end_stopped(self) -> list[str]:
        """Kills processes that are stopped (SIGSTOP), which no other signal reaches; returns their labels."""
        stopped = [process for process in self.processes if process.code is None and _is_stopped(process.popen.pid)]
        for process in stopped:
            process.was_stopped = True
            _signal_group(process, signal.SIGKILL)
        self._pump(lambda: all(process.code is not None for process in stopped), _KILL_WAIT_S)
        return [process.label for process in stopped]

    def first_failure(self, *, consequences: Sequence[int], final: Sequence[int] = ()) -> Process | None:
        """The first process that failed by itself, or had to be killed because it was stopped.

        Args:
          consequences: Exit codes of those that failed because of another; they count only if there is no other.
          final: Exit codes that come before all others.
        """
        causes = [process for process in self._failures if process.code not in consequences]
        causes.sort(key=lambda process: process.code not in final)  # stable: else in the order in which they failed
        return causes[0] if causes else self.failed

    def failed_the_same_way(self, failed: Process) -> list[str]:
        """Those that ended by themselves in the same way: with the same exit code, or killed by the same signal.

        After `stop`, an exit code counts too (a signal then is the one that it sent): it was on its way.

        Args:
          failed: The failed process.
        """
        others = [process for process in self.processes if process is not failed and process.code == failed.code]
        return [process.label for process in others if process in self._failures or failed.exit_code < 128]

    def stop(self, number: int, grace_period: float, *, first: Sequence[str] = ()) -> None:
        """Ends what still runs: the signal, then SIGKILL. A further signal to the launcher cuts the wait short.

        Args:
          number: The signal to ask with.
          grace_period: Seconds to wait for it.
          first: Labels of processes that need the others to end well: the others are asked once these have ended.
        """
        self._stopping = True
        signals, deadline = len(self._interrupts.received), time.monotonic() + grace_period
        for asked in [process for process in self.processes if process.label in first], self.processes:
            self._signal(number, asked)
            self._pump(functools.partial(self._stop_waiting, asked, signals), deadline - time.monotonic())
        self._signal(signal.SIGKILL, self.processes)
        self._pump(self._ended, _KILL_WAIT_S)
        self._pump(lambda: all(process.output < 0 for process in self.processes), _PIPE_WAIT_S)
        for process in self.processes:
            if process.output >= 0:  # held open by a process that left the group
                self._close(process)
        self._selector.close()

    def _stop_waiting(self, asked: Sequence[Process], signals: int) -> bool:
        return self._ended(asked) or len(self._interrupts.received) > signals

    def _ended(self, processes: Sequence[Process] | None = None) -> bool:
        return all(process.code is not None for process in (self.processes if processes is None else processes))

    def _signal(self, number: int, processes: Sequence[Process]) -> None:
        for process in processes:
            if process.code is None:
                _signal_group(process, number)

    def _pump(self, until: Callable[[], bool], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._interrupts.drain()
                    self._resize()
                else:
                    self._read(key.data)
            for process in self.processes:
                self._reap(process)

    def _read(self, process: Process) -> None:
        try:
            data = os.read(process.output, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:  # how a pseudo-terminal reports its end on Linux
                raise
            data = b""
        if data:
            process.channel.feed(data)
        else:
            self._close(process)

    def _close(self, process: Process) -> None:
        self._selector.unregister(process.output)
        os.close(process.output)
        process.output = -1
        process.channel.close()

    def _reap(self, process: Process) -> None:
        if process.code is not None or process.popen.poll() is None:
            return
        process.code = process.popen.returncode
        _signal_group(process, signal.SIGKILL)  # its own children
        self._guard.release(process.popen.pid)
        if process.code != 0 and not self._stopping:
            self._failures.append(process)

    def _resize(self) -> None:
        for process in self.processes:
            if process.output >= 0 and os.isatty(process.output):
                _set_size(process.output, process.label)


def _prepare(join: Callable[[], None], cores: Sequence[int]) -> None:
    """Runs in a new process between fork and exec."""
    join()
    if cores:
        with contextlib.suppress(OSError):  # a sandbox may forbid it, and all cores will do
            os.sched_setaffinity(0, cores)


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended, or this is no Linux
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _signal_group(process: Process, number: int) -> None:
    with contextlib.suppress(OSError):  # all of it has ended
        os.killpg(process.popen.pid, number)


def _set_size(terminal: int, label: str) -> None:
    """Gives a pseudo-terminal the size of the real one, less the room for the prefix `[label] `."""
    size = shutil.get_terminal_size()
    columns = max(20, size.columns - len(label) - 3)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, columns, 0, 0))
