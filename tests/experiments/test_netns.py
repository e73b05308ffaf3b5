"""Hosts made of network namespaces: they reach each other at the rate asked for, and leave nothing behind."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

from experiments.benchmarks import netns

import pytest

needs_namespaces = pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())
ROOT = pathlib.Path(__file__).parents[2]

# Of the receiver: bytes and seconds from the first to the last.
RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = server.accept()
received, began = len(connection.recv(1 << 16)), time.perf_counter()
while block := connection.recv(1 << 16):
    received += len(block)
print(received, time.perf_counter() - began, flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=10) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def namespaces() -> list[str]:
    """Names of all that this process has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if f"tfpar-{os.getpid()}-" in line]


def measured_rate(hosts: netns.Network, size: int) -> float:
    """Bits per second from host 0 to host 1."""
    receiver = subprocess.Popen(
        hosts.command(1, [sys.executable, "-c", RECEIVE, hosts.address(1)]), stdout=subprocess.PIPE, text=True
    )
    with receiver:
        assert receiver.stdout.readline() == "ready\n"
        subprocess.run(hosts.command(0, [sys.executable, "-c", SEND, hosts.address(1), str(size)]), check=True)
        received, seconds = receiver.stdout.readline().split()
    assert int(received) == size
    return 8 * size / float(seconds)


@needs_namespaces
def test_two_hosts_at_a_rate():
    with netns.network(2) as hosts:
        assert len(namespaces()) == 3
        unshaped = measured_rate(hosts, 20_000_000)
        before = hosts.sent_bytes(0)
        hosts.shape("100mbit")
        assert 3e7 < measured_rate(hosts, 4_000_000) < 1.5e8
        assert 4_000_000 <= hosts.sent_bytes(0) - before < 4_300_000
        assert unshaped > 4e8
        hosts.shape("none")
        assert measured_rate(hosts, 20_000_000) > 4e8
    assert not namespaces()


@needs_namespaces
def test_a_cable_pulled_and_put_back():
    with netns.network(2) as hosts:
        hosts.connect(1, False)
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(hosts.command(0, [sys.executable, "-c", SEND, hosts.address(1), "1"]), timeout=1, check=True)
        hosts.connect(1, True)
        assert measured_rate(hosts, 1000) > 0


@needs_namespaces
def test_an_error_leaves_nothing_behind():
    started = []

    def fail() -> None:
        with netns.network(2) as hosts:
            command = hosts.command(0, ["sleep", "600"])
            started.append(subprocess.Popen(command))
            while str(started[0].pid) not in subprocess.check_output(["ip", "netns", "pids", command[3]], text=True):
                time.sleep(0.01)  # it is not on the host yet
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    [left] = started
    assert left.wait(300) == -signal.SIGKILL
    assert not namespaces()


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_program_that_is_ended_leaves_nothing_behind(number):
    """Of one that was killed, the next clears up."""
    # Many short sleeps: a signal that arrives after CPython 3.11 last looked for one, and before a sleep has begun, is
    # handled only when that sleep ends.
    program = (
        "import time\nfrom experiments.benchmarks import netns\n"
        "with netns.network(1):\n print('ready', flush=True)\n while True: time.sleep(0.1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    ) as child:
        assert child.stdout.readline() == b"ready\n"
        path = pathlib.Path("/run/netns")
        mine = [name for name in os.listdir(path) if name.startswith(f"tfpar-{child.pid}-")]
        assert len(mine) == 2
        child.send_signal(number)
        child.wait(300)
    if number == signal.SIGKILL:
        netns.remove_left_behind()
    deadline = time.monotonic() + 300
    while any((path / name).exists() for name in mine) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any((path / name).exists() for name in mine)


def test_rates():
    assert netns.bits_per_second("100mbit") == 1e8
    assert netns.bits_per_second("2.5gbit") == 2.5e9
    assert netns.bits_per_second("none") is None
    for wrong in ("fast", "100", "0gbit", "1gbps"):
        with pytest.raises(ValueError, match="100mbit"):
            netns.bits_per_second(wrong)
