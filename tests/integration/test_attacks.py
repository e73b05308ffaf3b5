"""Strangers at the ports of real workers: nothing that they send ends a run, or keeps the workers from each other."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests.integration.test_multi_worker import launch
from tfpar_ops.transport_library import why_unusable

import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(why_unusable()), reason="the transport over Gloo is not built here"),
]
WORKERS = 3
# The headers of Gloo 0.5 and of the workers' handshakes, with invalid values: a length, an operation, a slot.
GLOO = struct.pack("6Q", 1 << 40, 1, 7, 0, 1 << 40, 0)
HANDSHAKE = struct.pack("8s4i32s", b"tfpar/4", 1, 0, WORKERS, 0, b"0123456789abcdef0123456789abcdef")


def attacks(seed: int, each: int) -> list[tuple[bytes, bool]]:
    """What is sent, and whether the connection is left open afterwards."""
    choose = random.Random(seed)
    return [
        *((choose.randbytes(choose.randrange(400)), False) for _ in range(each)),
        *((HANDSHAKE[: choose.randrange(len(HANDSHAKE))], False) for _ in range(each)),
        *((HANDSHAKE, False) for _ in range(each)),
        *((GLOO * choose.randrange(1, 20), False) for _ in range(each)),
        (choose.randbytes(1 << 22), False),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(1000), False),
        *((HANDSHAKE[:8], True) for _ in range(each)),
        *((b"", True) for _ in range(each)),
    ]


def attack(address: str, seed: int, each: int, left_open: list[socket.socket]) -> tuple[int, int]:
    """Connects for each attack; returns how many connections were taken, and how many refused."""
    host, port = address.split()
    taken = refused = 0
    for sent, stays in attacks(seed, each):
        try:
            connection = socket.create_connection((host, int(port)), timeout=20)
        except (ConnectionRefusedError, ConnectionResetError):  # reset: the port was closed while this one connected
            refused += 1
            continue
        taken += 1
        with contextlib.suppress(OSError):  # it is closed on us meanwhile
            connection.sendall(sent)
        if stays:
            left_open.append(connection)
        else:
            connection.close()
    return taken, refused


def wait_for(condition) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run_attacked(directory, each: int):
    """Runs the workers under attack: before, while and after they connect."""
    left_open: list[socket.socket] = []
    over = threading.Event()
    with ThreadPoolExecutor(2 * WORKERS + 1) as pool:
        workers = pool.submit(launch, WORKERS, "-m", "tests.integration.scripts.attacked", str(directory))
        wait_for(lambda: workers.done() or len(list(directory.glob("*.address"))) == WORKERS)
        addresses = [path.read_text() for path in sorted(directory.glob("*.address"))]
        before = list(pool.map(lambda address: attack(address, 1, each, left_open), addresses))

        def go_on(address: str) -> None:
            while not over.is_set():
                attack(address, 2, 2, left_open)
                time.sleep(0.01)

        during = [pool.submit(go_on, address) for address in addresses]
        (directory / "connect").touch()
        wait_for(lambda: workers.done() or len(list(directory.glob("*.connected"))) == WORKERS)
        over.set()
        try:
            for attacker in during:
                attacker.result()
            after = list(pool.map(lambda address: attack(address, 3, each, left_open), addresses))
        finally:
            (directory / "end").touch()
        result = workers.result()
    for connection in left_open:
        connection.close()
    return before, after, result


@pytest.mark.parametrize("each", [8, pytest.param(200, marks=pytest.mark.proof)])
def test_strangers_are_dropped_and_counted_and_the_run_goes_on(tmp_path, each):
    before, after, result = run_attacked(tmp_path, each)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    number = len(attacks(1, each))
    assert before == [(number, 0)] * WORKERS  # all of them could connect
    assert after == [(0, number)] * WORKERS  # nothing listens any more
    counts = [int(count) for count in re.findall(r"dropped (\d+) closed", said)]
    assert len(counts) == WORKERS, said
    assert min(counts) >= number, said
    assert f"{counts[0]} connections to this worker without the run's token were dropped" in said
