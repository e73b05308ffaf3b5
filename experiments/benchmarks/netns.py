"""Hosts on one machine: network namespaces joined by a switch, each link with a rate of its own.

```python
with netns.network(4) as hosts:
    hosts.shape("1gbit")
    subprocess.run(hosts.command(0, ["ping", hosts.address(1)]))
```

Everything lives in namespaces - the switch is a bridge in one of its own - so that nothing of the machine's own network
is touched, addresses of two runs do not meet, and taking the namespaces away takes everything away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# The pid in their names tells whose they are, and whether their owner is still there.
_PREFIX = "tfpar"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-")
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LINK = "eth0"
_PATIENCE_S = 10.0  # for killed processes to be gone
# A token bucket lets a whole burst through at once. It has to hold one packet, which is up to 64 KiB before it is cut
# into frames, and what is due until the kernel looks again; anything more would be bytes that cost no time.
_LEAST_BURST = 128 << 10
_BURST_S = 0.001
_QUEUE_S = 0.1

_counter = itertools.count()


class UnavailableError(RuntimeError):
    """Namespaces cannot be made here; the message says why, and what would help."""


def bits_per_second(rate: str) -> float | None:
    """The number behind `100mbit` or `10gbit`; None for `none`, a link that is not shaped.

    Raises:
      ValueError: Anything else.
    """
    if rate == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if not match or not float(match[1]):
        raise ValueError(f"{rate!r} is no rate of a link: give e.g. 100mbit, 1gbit, or none for a link as it is")
    return float(match[1]) * _UNITS[match[2]]


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts that reach each other.

    Attributes:
      namespaces: Name of each host's namespace.
      switch: Name of the namespace with the bridge between them.
    """

    namespaces: tuple[str, ...]
    switch: str

    def address(self, host: int) -> str:
        """IP address of a host."""
        return f"10.77.{host >> 8}.{(host & 255) + 1}"

    def command(self, host: int, arguments: Sequence[str], cores: Sequence[Sequence[int]] = ()) -> list[str]:
        """The command that runs a command on a host.

        Args:
          host: Number of the host.
          arguments: The command.
          cores: Numbers of the cores of each host, if it does not use all.
        """
        on_cores = ["taskset", "--cpu-list", ",".join(map(str, cores[host]))] if cores else []
        return ["ip", "netns", "exec", self.namespaces[host], *on_cores, *arguments]

    def shape(self, rate: str, hosts: Sequence[int] | None = None) -> None:
        """Limits what hosts send and what they receive; programs that run there notice nothing else.

        Args:
          rate: As for `bits_per_second`; `none` takes the limit away.
          hosts: By default all.
        """
        bits = bits_per_second(rate)
        for host in range(len(self.namespaces)) if hosts is None else hosts:
            for namespace, device in ((self.namespaces[host], _LINK), (self.switch, _port(host))):
                qdisc = ["tc", "-n", namespace, "qdisc"]
                if bits is None:  # fails where there was no limit
                    subprocess.run([*qdisc, "del", "dev", device, "root"], capture_output=True, check=False)
                else:
                    _run(*qdisc, "replace", "dev", device, "root", "tbf", *_limits(bits))

    def connect(self, host: int, connected: bool) -> None:
        """Pulls a host's cable, or puts it back."""
        _run("ip", "-n", self.switch, "link", "set", _port(host), "up" if connected else "down")

    def sent_bytes(self, host: int) -> int:
        """Bytes that a host's interface has sent."""
        return int(_run(*self.command(host, ["cat", str(counter("tx_bytes"))])))


def counter(name: str) -> Path:
    """A statistic of the link, e.g. `tx_bytes`, as a program on a host reads it.

    Packets count here before they are cut into frames: by their content, and a header for up to 64 KiB of it.
    """
    return Path("/sys/class/net") / _LINK / "statistics" / name


@functools.cache
def missing() -> str:
    """Why there can be no namespaces here, in one line with the way out; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    absent = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if absent:
        return f"`{'` and `'.join(absent)}` not found: apt-get install iproute2"
    if os.geteuid():
        return "network namespaces need root: run it with sudo"
    name = f"{_PREFIX}-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        try:  # some sandboxes know namespaces, and no bridges or no shaping
            _run("ip", "-n", name, "link", "add", "probe", "type", "bridge")
            _run(
                "tc",
                "-n",
                name,
                *["qdisc", "add", "dev", "probe", "root", "tbf", "rate", "1gbit", "burst", "128kb", "latency", "10ms"],
            )
        finally:
            _run("ip", "netns", "del", name)
    except UnavailableError as error:
        return f"network namespaces with shaped links need CAP_SYS_ADMIN, bridges and tbf: {error}"
    return ""


@contextlib.contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Hosts with unshaped links; in the end, whatever happens, they are gone, and what still ran on them is killed.

    SIGTERM and SIGHUP end the program in the way Ctrl-C does while there are any. What a killed program left behind is
    taken away first.

    Raises:
      UnavailableError: Namespaces cannot be made here.
    """
    if missing():
        raise UnavailableError(missing())
    remove_left_behind()
    owner = f"{_PREFIX}-{os.getpid()}-{next(_counter)}"
    made = Network(tuple(f"{owner}-host{host}" for host in range(hosts)), f"{owner}-switch")
    with _ends_raise():
        try:
            _build(made)
            yield made
        finally:
            for name in _existing():
                if name.startswith(f"{owner}-"):
                    _remove(name)


def remove_left_behind() -> None:
    """Takes away the namespaces of programs that are gone."""
    for name in _existing():
        match = _NAME.match(name)
        if match and not Path("/proc", match[1]).exists():
            _remove(name)


def _build(made: Network) -> None:
    _run("ip", "netns", "add", made.switch)
    _run("ip", "-n", made.switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", made.switch, "link", "set", "bridge", "up")
    for host, name in enumerate(made.namespaces):
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, *f"link add {_LINK} type veth peer name {_port(host)} netns {made.switch}".split())
        _run("ip", "-n", made.switch, "link", "set", _port(host), "master", "bridge", "up")
        _run("ip", "-n", name, "address", "add", f"{made.address(host)}/16", "dev", _LINK)
        _run("ip", "-n", name, "link", "set", _LINK, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")  # a host talks to itself, too


def _limits(bits: float) -> list[str]:
    """tc's arguments of a token bucket."""
    burst = max(_LEAST_BURST, int(bits / 8 * _BURST_S))
    return ["rate", f"{bits:.0f}bit", "burst", str(burst), "latency", f"{_QUEUE_S * 1000:.0f}ms"]


def _port(host: int) -> str:
    return f"port{host}"


def _existing() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _remove(name: str) -> None:
    """A namespace without a name lives on while a program is in it: those go first."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        pids = [int(pid) for pid in listed.stdout.split()]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextlib.contextmanager
def _ends_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP as exceptions, which by default would end Python without any clean-up."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    try:
        before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    except ValueError:  # not in the main thread, where signals are no concern
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UnavailableError(f"`{' '.join(command)}`: {result.stderr.strip() or result.returncode}")
    return result.stdout
