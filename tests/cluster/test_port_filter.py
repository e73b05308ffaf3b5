"""Who reaches a listening socket: real sockets, the machine's own addresses."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
import subprocess
import sys

from tests import nursery
from tests.integration.test_multi_worker import launch
from tfpar.cluster import ClusterInfo, port_filter
from tfpar.config import ConfigError, StrategyConfig
from tfpar.parallel.topology import choose_topology

import pytest

pytestmark = pytest.mark.without_keras


@contextlib.contextmanager
def wildcard_server():
    """A socket as TensorFlow's gRPC makes it: on all addresses, of IPv6 and IPv4 together."""
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", 0))
        server.listen()
        yield server, server.getsockname()[1]


def reaches(host: str, port: int) -> bool:
    """Whether a connection comes about; a dropped one shows as silence."""
    with contextlib.suppress(TimeoutError), socket.create_connection((host, port), timeout=0.5):
        return True
    return False


def outside_addresses() -> list[str]:
    """The machine's own addresses that are not loopback, IPv4 and IPv6."""
    found = []
    for family, peer in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Connecting a datagram socket sends nothing; it tells which own address would be used.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))
            found.append(probe.getsockname()[0])
    return found


OUTSIDE = outside_addresses()
needs_a_network = pytest.mark.skipif(not OUTSIDE, reason="this machine has no address but loopback")


@needs_a_network
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_local_cluster_is_reached_over_loopback_only(host):
    with wildcard_server() as (_, port):
        everywhere = ["127.0.0.1", "127.0.0.2", "::1", *OUTSIDE]
        assert all(reaches(address, port) for address in everywhere)
        assert port_filter.restrict(f"{host}:{port}", {}) == f"port {port} answers on loopback only"
        assert [address for address in everywhere if reaches(address, port)] == ["127.0.0.1", "127.0.0.2", "::1"]


@needs_a_network
def test_a_worker_is_reached_on_its_address_of_tf_config_and_over_loopback():
    for mine in OUTSIDE:
        host = f"[{mine}]" if ":" in mine else mine
        with wildcard_server() as (_, port):
            assert port_filter.restrict(f"{host}:{port}", {}) == f"port {port} answers on {mine} and loopback only"
            assert [address for address in ("127.0.0.1", "::1", *OUTSIDE) if reaches(address, port)] == [
                "127.0.0.1",
                "::1",
                mine,
            ]


def test_data_flows_through_the_filter_in_both_directions():
    with wildcard_server() as (server, port):
        port_filter.attach(server.fileno(), [])
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as accepted:
            sent = os.urandom(1 << 20)
            for one, other in ((client, accepted), (accepted, client)):
                one.settimeout(300)
                reader = os.fork()
                if reader == 0:
                    received = b""
                    while len(received) < len(sent):
                        received += other.recv(1 << 16)
                    os._exit(0 if received == sent else 1)
                one.sendall(sent)
                assert os.waitpid(reader, 0)[1] == 0


def test_many_addresses_of_both_kinds():
    addresses = [ipaddress.ip_address(f"10.0.0.{n}") for n in range(8)] + [
        ipaddress.ip_address(f"2001:db8::{n}") for n in range(8)
    ]
    with wildcard_server() as (server, port):
        port_filter.attach(server.fileno(), addresses)
        assert reaches("127.0.0.1", port)
        assert reaches("::1", port)
        assert not any(reaches(address, port) for address in OUTSIDE)


@pytest.mark.parametrize(
    ("address", "environ", "why"),
    [
        ("192.0.2.77:{port}", {}, "192.0.2.77 resolves to 192.0.2.77, which this machine does not have"),
        ("no-such-host.invalid:{port}", {}, "no-such-host.invalid does not resolve here"),
        ("127.0.0.1:{port}", {"TFPAR_LISTEN": "all"}, "TFPAR_LISTEN=all"),
        ("127.0.0.1:1", {}, "no socket of this process listens on port 1"),
    ],
)
def test_what_cannot_be_told_leaves_the_port_open_and_says_why(address, environ, why):
    with wildcard_server() as (_, port):
        with pytest.raises(port_filter.StillOpenError, match=why):
            port_filter.restrict(address.format(port=port), environ)
        assert reaches("127.0.0.1", port)


def test_an_unknown_value_of_the_variable_is_refused_before_a_port_is_open(monkeypatch):
    assert not port_filter.is_open({"TFPAR_LISTEN": ""})
    info = ClusterInfo("TF_CONFIG", {"worker": ("127.0.0.1:1", "127.0.0.1:2")}, "worker", 0)
    monkeypatch.setenv("TFPAR_LISTEN", "ALL")
    for use in (lambda: choose_topology(StrategyConfig(), info), lambda: port_filter.own_addresses("127.0.0.1")):
        with pytest.raises(ConfigError, match=r"TFPAR_LISTEN='ALL' is not known\. Set it to all, which .* or unset it"):
            use()


def test_a_name_that_is_loopback_here_only_is_not_trusted(monkeypatch):
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]  # /etc/hosts of Debian
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments: answer)
    with pytest.raises(port_filter.StillOpenError, match="node7 is a loopback address on this machine"):
        port_filter.own_addresses("node7")


SERVER = """
import sys
from tfpar.cluster import port_filter
import tensorflow as tf
port = int(sys.argv[1])
server = tf.distribute.Server({"worker": [f"127.0.0.1:{port}"]}, job_name="worker", task_index=0)
print("open", flush=True)
sys.stdin.readline()
print(port_filter.restrict(f"127.0.0.1:{port}"), flush=True)
sys.stdin.readline()
"""


@needs_a_network
def test_tensorflow_binds_all_addresses_and_is_restricted_to_its_own():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with nursery.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "open\n"
            # If this fails, TensorFlow has learned to bind the address it is given: drop tfpar.cluster.port_filter.
            assert reaches(OUTSIDE[0], port)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"port {port} answers on loopback only\n"
            assert not reaches(OUTSIDE[0], port)
            assert reaches("127.0.0.1", port)
        finally:
            process.kill()


@needs_a_network
@pytest.mark.cluster
def test_the_workers_of_a_local_cluster_are_reached_over_loopback_only():
    result = launch(2, "tests/integration/scripts/reach.py", OUTSIDE[0])
    assert result.returncode == 0, result.stdout
    answers = [json.loads(found) for found in re.findall(r"reached (\{.*\})", result.stdout)]
    assert len(answers) == 2
    for answer in answers:
        assert len(answer) == 4
        assert all(reached == name.startswith("127.0.0.1 ") for name, reached in answer.items()), answer
    assert "is open on all addresses" not in result.stdout
