"""Workers that wait for each other, on real sockets, while strangers say what they like."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

from tfpar.cluster import ClusterInfo, rendezvous
from tfpar.config import ConfigError
from tfpar.config.errors import TrainingError
from tfpar.launch import free_ports
from tfpar.process.exit_codes import PeerLostError

import pytest

pytestmark = pytest.mark.without_keras


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        yield executor


def cluster(workers: int) -> list[ClusterInfo]:
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(workers))
    return [ClusterInfo("test", {"worker": addresses}, "worker", rank) for rank in range(workers)]


def connected(info: ClusterInfo) -> socket.socket:
    """A connection to the chief, once it listens."""
    host, _, port = info.worker_addresses[0].rpartition(":")
    for _ in range(200):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), timeout=5.0)
        time.sleep(0.02)
    raise AssertionError("the chief does not listen")


def test_all_go_on_once_everyone_has_come(pool):
    infos = cluster(4)
    waiting = [pool.submit(rendezvous.wait_for_all, info, 120.0) for info in infos[:3]]
    done, _ = concurrent.futures.wait(waiting, timeout=0.5)
    assert not done
    rendezvous.wait_for_all(infos[3], 120.0)
    for one in waiting:
        one.result(timeout=300)


def test_what_the_chief_says_reaches_all(pool):
    infos = cluster(3)
    longest = ["".ljust(rendezvous.MESSAGE_BYTES, str(rank)) for rank in range(3)]
    said = [pool.submit(rendezvous.wait_for_all, info, 120.0, text) for info, text in zip(infos, longest, strict=True)]
    assert [one.result(timeout=300) for one in said] == [longest[0]] * 3


def test_what_strangers_say_harms_nobody_and_keeps_nobody_waiting(pool):
    infos = cluster(2)
    chief = pool.submit(rendezvous.wait_for_all, infos[0], 120.0)
    lines = [b"{}", b"[]", b"1", b"null", b"\xff\xfe", b"[" * 4000, b'{"cluster": null}', b"GET / HTTP/1.1\r", b""]
    lines += [b'{"cluster": "%s", "place": %s}' % (rendezvous._digest(infos[0]).encode(), place) for place in PLACES]
    with contextlib.ExitStack() as stack:
        for _ in range(20):  # that say nothing at all
            stack.enter_context(connected(infos[0]))
        for line in lines:
            with connected(infos[0]) as connection:
                connection.sendall(line + b"\n")
                assert connection.recv(1) == b"", line  # it is shown the door
        assert not chief.done()
        began = time.monotonic()
        rendezvous.wait_for_all(infos[1], 120.0)
        chief.result(timeout=300)
        assert time.monotonic() - began < 60.0


@pytest.mark.parametrize(("limits", "idle"), [((3, 600.0), 4), ((64, 0.1), 1)], ids=["number", "time"])
def test_strangers_that_say_nothing_are_shown_the_door(pool, monkeypatch, limits, idle):
    """The oldest one first where there are too many, and each after a while."""
    monkeypatch.setattr(rendezvous, "_MOST_PENDING", limits[0])
    monkeypatch.setattr(rendezvous, "_GREETING_S", limits[1])
    infos = cluster(2)
    chief = pool.submit(rendezvous.wait_for_all, infos[0], 600.0)
    with contextlib.ExitStack() as stack:
        first, *_ = [stack.enter_context(connected(infos[0])) for _ in range(idle)]
        first.settimeout(120.0)
        assert first.recv(1) == b""
        assert not chief.done()
        rendezvous.wait_for_all(infos[1], 120.0)
        chief.result(timeout=300)


def test_without_a_descriptor_left_the_oldest_stranger_goes():
    [info] = cluster(1)
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener = stack.enter_context(contextlib.closing(rendezvous._Listener(info, server)))
        clients = [stack.enter_context(socket.socket()) for _ in range(2)]
        clients[0].connect(server.getsockname())
        listener.serve(60.0)
        clients[1].connect(server.getsockname())
        lowest_free = os.dup(server.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, most))
        try:
            listener.serve(60.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        clients[0].settimeout(60.0)
        assert clients[0].recv(1) == b""
        clients[1].sendall(b"{}\n")
        listener.serve(60.0)
        assert clients[1].recv(1) == b""  # it was heard


PLACES = [b"null", b'"1"', b"true", b"0", b"2", b"-1", b"1e999", b"[1]"]


@pytest.mark.parametrize(("source", "kind"), [("TF_CONFIG", ConfigError), ("kubernetes", PeerLostError)])
def test_a_worker_with_another_list_is_told_and_the_chief_says_who_it_was(pool, capfd, source, kind):
    """Lists that pods have asked for may be of different times: started again, they have the same."""
    infos = cluster(2)
    other = ClusterInfo(source, {"worker": (infos[0].address, "127.0.0.1:1")}, "worker", 1)
    chief = pool.submit(rendezvous.wait_for_all, infos[0], 120.0)
    with pytest.raises(kind, match="the chief has a different list of workers"):
        rendezvous.wait_for_all(other, 120.0)
    assert "WARNING: 127.0.0.1 reported a different worker list and was rejected" in capfd.readouterr().out
    rendezvous.wait_for_all(infos[1], 120.0)
    chief.result(timeout=300)


NAMES = {
    "debian": ["127.0.1.1"],  # /etc/hosts: what other machines resolve is another address
    "both": ["127.0.1.1", "192.0.2.1"],
    "service": ["192.0.2.1"],  # an address of no machine
    "early": [],  # does not resolve yet
}


@pytest.mark.parametrize("name", NAMES)
def test_a_chief_is_reached_wherever_its_own_name_leads(pool, monkeypatch, name):
    def resolved(host, port, *arguments, **options):
        if host == name and not NAMES[name]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        hosts = NAMES[name] if host == name else [host]
        return [each for address in hosts for each in found(address, port, *arguments, **options)]

    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    first, second = free_ports(2)
    info = ClusterInfo("test", {"worker": (f"{name}:{first}", f"other:{second}")}, "worker", 0)
    chief = pool.submit(rendezvous.wait_for_all, info, 120.0)
    peer = ClusterInfo("test", {"worker": (f"127.0.0.1:{first}", f"127.0.0.1:{second}")}, "worker", 0)
    with connected(peer) as connection:
        connection.sendall(b'{"cluster": "%s", "place": 1}\n' % rendezvous._digest(info).encode())
        assert connection.recv(3) == b"go "
    chief.result(timeout=300)


def test_a_port_that_is_taken_is_named():
    infos = cluster(2)
    port = int(infos[0].address.rpartition(":")[2])
    taken = rf"^worker 0 \(127\.0\.0\.1:{port}\) cannot listen on port {port} of its machine: Address already in use "
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(
            TrainingError, match=taken + r"\(Could not start gRPC server\)\. End .* port in TF_CONFIG, for all"
        ),
    ):
        rendezvous.wait_for_all(infos[0], 120.0)


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH_9.2p1\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_program_on_the_chiefs_port_is_not_the_chief(pool, banner):
    """A worker waits until that program ends and the chief starts, or says what it found."""
    infos = cluster(2)
    host, _, port = infos[0].address.rpartition(":")
    over = threading.Event()

    def answer(server):
        while not over.is_set():
            with contextlib.suppress(TimeoutError), server.accept()[0] as connection:
                connection.sendall(banner)

    with socket.create_server((host, int(port))) as server:
        server.settimeout(0.1)
        program = pool.submit(answer, server)
        with pytest.raises(
            PeerLostError, match=r"worker 0 .* did not join .* something else than .*(SSH-2|HTTP/1\.1 400)"
        ):
            rendezvous.wait_for_all(infos[1], 0.5)
        over.set()
        program.result(timeout=300)


def test_two_processes_with_one_index_are_named(pool, capfd, monkeypatch):
    monkeypatch.setattr(rendezvous, "_CLOSE_S", 0.1)
    infos = cluster(3)
    chief = pool.submit(rendezvous.wait_for_all, infos[0], 2.0)
    both = "wo processes say that they are worker 1, 127.0.0.1 (process 7) and 127.0.0.1 (process 8): give each its own"
    with contextlib.ExitStack() as stack:
        for process in (7, 8):
            line = {"cluster": rendezvous._digest(infos[0]), "place": 1, "process": process}
            stack.enter_context(connected(infos[0])).sendall(json.dumps(line).encode() + b"\n")
        with pytest.raises(PeerLostError) as error:
            chief.result(timeout=300)
    assert f"worker 2 ({infos[2].address}) did not join" in str(error.value)
    assert f" T{both} task index." in str(error.value)
    assert f"WARNING: t{both}" in capfd.readouterr().out


def test_one_that_comes_again_takes_its_place(pool):
    infos = cluster(3)
    chief = pool.submit(rendezvous.wait_for_all, infos[0], 120.0)
    greeting = b'{"cluster": "%s", "place": 1}\n' % rendezvous._digest(infos[0]).encode()
    with connected(infos[0]) as first:
        first.sendall(greeting)
        again = pool.submit(rendezvous.wait_for_all, infos[1], 120.0)
        assert first.recv(1) == b""
    rendezvous.wait_for_all(infos[2], 120.0)
    for one in (chief, again):
        one.result(timeout=300)


def test_one_that_ends_after_it_has_come_is_missing_until_it_comes_again(pool, capfd):
    infos = cluster(3)
    chief = pool.submit(rendezvous.wait_for_all, infos[0], 120.0)
    with connected(infos[0]) as first:
        first.sendall(b'{"cluster": "%s", "place": 1}\n' % rendezvous._digest(infos[0]).encode())
    other = pool.submit(rendezvous.wait_for_all, infos[2], 120.0)
    done, _ = concurrent.futures.wait([chief, other], timeout=0.5)
    assert not done
    rendezvous.wait_for_all(infos[1], 120.0)
    for one in (chief, other):
        one.result(timeout=300)
    assert f"WARNING: worker 1 ({infos[1].address}) joined and has ended since" in capfd.readouterr().out


def test_those_missing_are_named(pool):
    infos = cluster(3)
    worker = pool.submit(rendezvous.wait_for_all, infos[1], 120.0)
    with pytest.raises(PeerLostError, match=rf"worker 2 \({infos[2].address}\) did not join within 1 s"):
        rendezvous.wait_for_all(infos[0], 1.0)
    with pytest.raises(PeerLostError, match="worker 2"):  # the chief has told it
        worker.result(timeout=300)
