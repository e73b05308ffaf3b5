"""Where a worker listens for the native transport, and where it cannot."""

from __future__ import annotations

import socket

from tfpar.cluster import ClusterInfo, port_filter
from tfpar.collectives import gloo_mesh
from tfpar.config import ConfigError, StrategyConfig
from tfpar.parallel.topology import choose_topology

import pytest

NAMES = {
    "debian": ["127.0.1.1"],
    "both": ["127.0.1.1", "10.0.0.7", "fd00::7"],
    "elsewhere": ["192.0.2.1"],
    "mixed": ["192.0.2.1", "fd00::7", "10.0.0.7"],
}
OWN = ("10.0.0.7", "fd00::7")


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that resolve without a network, on a machine with two addresses beside loopback."""

    def resolved(host: str, *_: object) -> list[tuple]:
        if host not in NAMES and not host[0].isdigit():
            raise socket.gaierror("unknown")
        return [(None, None, None, "", (address, 0)) for address in NAMES.get(host, [host])]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(port_filter, "_is_own", lambda address: str(address) in OWN)
    monkeypatch.setattr(gloo_mesh, "why_unusable", lambda: "")


def workers(*addresses: str) -> ClusterInfo:
    return ClusterInfo("TF_CONFIG", {"worker": addresses}, "worker", 0)


@pytest.mark.parametrize(
    ("host", "listens"),
    [
        ("both", "10.0.0.7"),
        ("mixed", "fd00::7"),
        ("10.0.0.7", "10.0.0.7"),
        ("debian", "debian"),
        ("elsewhere", "elsewhere"),
        ("nowhere", "nowhere"),
    ],
)
def test_a_worker_listens_on_an_address_that_its_peers_reach(host, listens):
    assert gloo_mesh.listening_host(workers(f"{host}:2222", "other:2222")) == listens
    assert gloo_mesh.listening_host(workers("127.0.0.1:1", "127.0.0.1:2")) == "127.0.0.1"


def test_a_loopback_address_is_refused_unless_all_workers_are_on_the_machine():
    config = StrategyConfig(transport="gloo")
    with pytest.raises(ConfigError, match=r"=gloo: this worker cannot listen on its own address: debian is a loopback"):
        choose_topology(config, workers("debian:2222", "other:2222"))
    assert "debian is a loopback address" in gloo_mesh.obstacle(workers("debian:2222", "other:2222"))
    for together in (("debian:1", "debian:2"), ("127.0.0.1:1", "127.0.0.1:2"), ("localhost:1", "127.0.0.1:2")):
        assert choose_topology(config, workers(*together)).transport == "gloo"
        assert gloo_mesh.obstacle(workers(*together)) == ""
        assert choose_topology(StrategyConfig(), workers(*together)).transport_reason == ""


def test_other_addresses_are_refused_where_they_are_listened_on():
    for host in ("elsewhere", "nowhere"):
        assert gloo_mesh.obstacle(workers(f"{host}:2222", "other:2222"))
        assert choose_topology(StrategyConfig(transport="gloo"), workers(f"{host}:2222", "b:1")).transport == "gloo"
