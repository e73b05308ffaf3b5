"""Signals to the launcher, as data that a selector waits for."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time


class Interrupts:
    """Signals as data: `received` fills up, and a byte on `wakeup` ends the wait of a selector.

    SIGHUP counts only if it is the first: a closed terminal may send several, of which none means that a user wants the
    processes killed at once.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.wakeup, self._write_end = socket.socketpair()
        self.wakeup.setblocking(False)
        self._write_end.setblocking(False)

    def __enter__(self) -> Interrupts:
        self._previous_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        wanted = [number for number in ends if signal.getsignal(number) != signal.SIG_IGN]  # nohup keeps its meaning
        self._previous = {number: signal.signal(number, self._note) for number in wanted}
        self._previous |= {n: signal.signal(n, lambda *_: None) for n in (signal.SIGCHLD, signal.SIGWINCH)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self.wakeup.close()
        self._write_end.close()

    @property
    def to_pass_on(self) -> int:
        """The signal with which to end the processes: the first one; SIGTERM for SIGHUP, which would end them without
        saving, and if there is none."""
        first = self.received[0] if self.received else signal.SIGTERM
        return signal.SIGTERM if first == signal.SIGHUP else first

    def _note(self, number: int, _: object) -> None:
        if number != signal.SIGHUP or not self.received:
            self.received.append(number)

    def drain(self) -> None:
        """Empties the wake-up socket."""
        with contextlib.suppress(BlockingIOError):
            while self.wakeup.recv(4096):
                pass

    def sleep(self, seconds: float) -> None:
        """Waits, unless a signal that ends the launcher comes."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.wakeup, selectors.EVENT_READ)
            while not self.received and (left := deadline - time.monotonic()) > 0:
                selector.select(left)
                self.drain()
