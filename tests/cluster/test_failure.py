"""Who was lost, from what TensorFlow says; waiting at the start. Real losses: tests/faults."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from typing import Any

from tests import nursery
from tfpar.cluster import ClusterInfo, failure
from tfpar.collectives import gloo_mesh
from tfpar.launch import free_ports
from tfpar.process.exit_codes import PEER_LOST, PeerLostError

import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).parents[2]

# As TensorFlow 2.21 words them, shortened.
UNHEALTHY = """Collective ops is aborted by: Error reported from /job:worker/task:2: The following tasks are unhealthy \
(stopped sending heartbeats):
/job:worker/replica:0/task:2
/job:worker/replica:0/task:1
The tasks have crashed. Check the task logs for an earlier error."""
LEADER = """Collective ops is aborted by: Deadline Exceeded
RPC: /tensorflow.CoordinationService/Heartbeat"""
RESET = """Collective ops is aborted by: recvmsg:Connection reset by peer
Additional GRPC error information from remote target /job:worker/replica:0/task:2 while calling WorkerService/RecvBuf:
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling WorkerService/RecvBuf:
"""


def cluster_of(rank, workers=4):
    addresses = tuple(f"10.0.0.{number + 1}:2222" for number in range(workers))
    return ClusterInfo("test", {"worker": addresses}, "worker", rank)


def unavailable(text):
    return tf.errors.UnavailableError(None, None, text)


@pytest.fixture
def answering(monkeypatch):
    """Ranks that answer when asked."""
    ranks = {0, 1, 2, 3}
    monkeypatch.setattr(failure, "_answers", lambda _, rank: rank in ranks)
    monkeypatch.setattr(failure, "_ENDING_S", 0.0)
    monkeypatch.setattr(failure, "_LINGER_S", 0.0)
    return ranks


def test_the_service_lists_those_that_are_silent(answering):
    assert failure.find_lost(unavailable(UNHEALTHY), cluster_of(0)) == [2, 1]
    assert failure.find_lost(unavailable(UNHEALTHY), cluster_of(1)) == [2]


def test_the_native_transport_names_those_that_do_not_answer(answering):
    # Nobody is asked again.
    silent = [gloo_mesh._names(cluster_of(0))[rank] for rank in (2, 3)]
    text = f"Collective all_reduce: {gloo_mesh._silent_text(silent)}"
    assert failure.find_lost(unavailable(text), cluster_of(0)) == [2, 3]


@pytest.mark.parametrize("error", ["Connection timed out", "No route to host"])
def test_a_worker_that_cannot_be_reached_over_the_native_transport_is_named(answering, error):
    """Though it answers TensorFlow, over another connection."""
    text = (
        f"Collective call: lost {gloo_mesh._names(cluster_of(0))[2]}: Read error [10.0.0.3]:4711: {error} [Op:X] name: "
    )
    assert failure.find_lost(unavailable(text), cluster_of(0)) == [2]


@pytest.mark.parametrize("bound", [8.0, 10.0, 30.0, 300.0])
def test_the_native_transport_leaves_time_to_say_who_is_lost(bound):
    """A worker waits, asks three times, and reports."""
    watch = gloo_mesh._Watch(None, 0, cluster_of(0), bound)
    longest = watch._quiet + watch._pause + gloo_mesh._MISSES * watch._ask
    assert longest + failure._LINGER_S < bound
    assert gloo_mesh._SILENCE_SHARE * bound + failure._LINGER_S < bound


def test_heartbeats_that_reach_nobody_mean_the_chief(answering):
    assert failure.find_lost(tf.errors.DeadlineExceededError(None, None, LEADER), cluster_of(3)) == [0]


def test_a_chief_that_ended_hides_nobody(answering):
    """One who learns of a loss late finds the chief gone too, because of it."""
    answering -= {0, 2}
    for text in (LEADER, "Socket closed"):
        assert failure.find_lost(unavailable(text), cluster_of(3)) == [0, 2]


@pytest.mark.parametrize(("bound", "heartbeats"), [(8.0, 4.0), (10.0, 5.0), (20.0, 15.0), (30.0, 24.0)])
def test_heartbeats_leave_time_to_say_who_is_lost(bound, heartbeats):
    assert failure._heartbeat_timeout(bound) == heartbeats
    assert heartbeats + 1 + failure._LINGER_S <= bound


def test_of_those_in_a_broken_call_the_one_that_does_not_answer(answering):
    answering.remove(1)
    assert failure.find_lost(unavailable(RESET), cluster_of(0)) == [1]
    answering.remove(2)  # it is spoken of first: the others broke because of it
    assert failure.find_lost(unavailable(RESET), cluster_of(0)) == [2]


def test_one_that_is_not_spoken_of_is_found_too(answering):
    answering.remove(3)
    assert failure.find_lost(unavailable("Socket closed"), cluster_of(0)) == [3]


def test_all_may_answer(answering):
    assert failure.find_lost(unavailable(RESET), cluster_of(0)) == []


def test_the_error_names_worker_and_address(answering):
    answering.remove(2)
    with (
        pytest.raises(PeerLostError, match=r"lost worker 2 \(10.0.0.3:2222\)"),
        failure.peer_errors_named(cluster_of(0)),
    ):
        raise unavailable(RESET)
    answering.add(2)
    with pytest.raises(PeerLostError, match="every worker answers"), failure.peer_errors_named(cluster_of(0)):
        raise unavailable(RESET)


@pytest.mark.parametrize("error", [tf.errors.InvalidArgumentError(None, None, "x /task:1"), ValueError("x")])
def test_other_errors_pass_unchanged(answering, error):
    with pytest.raises(type(error)), failure.peer_errors_named(cluster_of(0)):
        raise error


STORAGE = "Error executing an HTTP request: HTTP response code 503 when reading gs://bucket/file"
BY_OWN_DEVICE = "{{function_node __wrapped__ReadFile_device_/job:worker/replica:0/task:0/device:CPU:0}} "


@pytest.mark.parametrize("text", [STORAGE, BY_OWN_DEVICE + STORAGE])
def test_a_connection_of_the_program_itself_is_no_lost_worker(answering, text):
    handler = signal.getsignal(signal.SIGTERM)
    for kind in (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.InternalError):
        with pytest.raises(kind, match="503"), failure.peer_errors_named(cluster_of(0)):
            raise kind(None, None, text)
    assert signal.getsignal(signal.SIGTERM) == handler
    answering.remove(3)  # nothing but the broken connection may tell of a loss
    with pytest.raises(PeerLostError, match="lost worker 3 "), failure.peer_errors_named(cluster_of(0)):
        raise unavailable(text)


def test_of_asynchronous_training_tasks_are_asked_if_the_error_names_none(monkeypatch):
    info = ClusterInfo("test", {"chief": ("a:1",), "worker": ("b:1",), "ps": ("c:1", "d:1")}, "chief", 0)
    silent: set[str] = set()
    monkeypatch.setattr(
        failure.heartbeat, "probe_servers", lambda addresses, _: [each not in silent for each in addresses]
    )
    with pytest.raises(tf.errors.UnavailableError, match="503"), failure.peer_errors_named(info):
        raise unavailable(STORAGE)
    silent.add("c:1")
    with pytest.raises(PeerLostError, match=r"lost ps 0 \(c:1\): "), failure.peer_errors_named(info):
        raise unavailable("Socket closed")


def test_alone_nothing_is_lost(answering):
    for info in (None, cluster_of(0, workers=1)):
        with pytest.raises(tf.errors.UnavailableError), failure.peer_errors_named(info):
            raise unavailable(RESET)


@pytest.fixture(autouse=True)
def _sigterm():
    """After `named`, SIGTERM says who was lost and ends the process; not this one."""
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_of_asynchronous_training_the_server_is_named():
    text = "Connection reset\nfrom /job:ps/replica:0/task:1 while calling\nfrom /job:worker/replica:0/task:0 while"
    info = ClusterInfo("test", {"chief": ("a:1",), "worker": ("b:1",), "ps": ("c:1", "d:1")}, "chief", 0)
    said = r"lost ps 1 \(d:1\): ended, hanging or not reachable\. The chief ends"
    with pytest.raises(PeerLostError, match=said), failure.peer_errors_named(info):
        raise unavailable(text)
    with pytest.raises(PeerLostError, match=r"lost worker 0 \(b:1\): "), failure.peer_errors_named(info):
        raise unavailable("refused\nfrom /job:worker/replica:0/task:0/device:CPU:0 while, /job:chief/replica:0/task:0")


CAUGHT = """
import os, signal
import tensorflow as tf
from tfpar.cluster import failure
from tfpar.cluster import ClusterInfo
from tfpar.guards.preemption import PreemptionFlag
from tfpar.process.exit_codes import PeerLostError, install_sigterm_handler

PREPARE

def answers(_, rank):
    os.kill(os.getpid(), signal.SIGTERM)  # a launcher that ends everyone, while this worker looks for who is lost
    return rank != 1

failure._answers = answers
failure._LINGER_S = 0
try:
    with AROUND failure.peer_errors_named(ClusterInfo("test", {"worker": ("a:1", "b:1")}, "worker", 0)):
        raise tf.errors.UnavailableError(None, None, "Collective ops is aborted by: recvmsg")
except PeerLostError:
    print("caught", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("went on", flush=True)
"""


OWN = 'signal.signal(signal.SIGTERM, lambda *_: print("own handler", flush=True))'


@pytest.mark.parametrize(
    ("prepare", "around", "output", "code"),
    [
        ("", "", "caught\n", PEER_LOST),
        ("install_sigterm_handler()", "", "caught\n", PEER_LOST),  # as tfpar.validate does
        ("install_sigterm_handler()", "PreemptionFlag(),", "caught\n", PEER_LOST),  # as a run does
        (OWN, "", "caught\nown handler\nwent on\n", 0),
        (OWN, "PreemptionFlag(),", "caught\nown handler\nwent on\n", 0),
    ],
)
def test_a_program_that_catches_the_loss_can_still_be_ended(prepare, around, output, code):
    program = CAUGHT.replace("PREPARE", prepare).replace("AROUND", around)
    done = nursery.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (output, code), done.stderr
    assert ("error: lost worker 1 (b:1): " in done.stderr) == (code == PEER_LOST)


def test_in_any_script_the_loss_is_one_line_and_an_exit_code():
    code = "\n".join(
        [
            "import tensorflow as tf",
            "from tfpar.cluster import failure",
            "from tfpar.cluster import ClusterInfo",
            "failure._answers = lambda _, rank: rank != 1",
            "failure._LINGER_S = 0",
            "info = ClusterInfo('test', {'worker': ('a:1', 'b:1')}, 'worker', 0)",
            "failure.install_peer_loss_hook(info)",
            "raise tf.errors.UnavailableError(None, None, 'Collective ops is aborted by: recvmsg')",
        ]
    )
    done = nursery.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == PEER_LOST
    assert done.stderr.splitlines()[-1].startswith("error: lost worker 1 (b:1): ended, hanging or not reachable.")
    assert "Traceback" not in done.stderr
    other = code.replace("tf.errors.UnavailableError(None, None, ", "ValueError(")
    done = nursery.run([sys.executable, "-c", other], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def classify(config: dict[str, Any], *flags: str) -> subprocess.CompletedProcess:
    """Runs the image classifier as a task of a cluster."""
    return nursery.run(
        [sys.executable, "experiments/image_classification.py", "--steps=2", *flags],
        cwd=ROOT,
        env={**os.environ, "TF_CONFIG": json.dumps(config)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.cluster
def test_a_port_that_tensorflow_cannot_open_is_named_and_no_lost_worker():
    """With exit code 75, a scheduler would start again for ever."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = {"cluster": {"worker": [f"127.0.0.1:{port}"]}, "task": {"type": "worker", "index": 0}}
        done = classify(config, "--strategy=multi_worker")
    said = (
        f"error: worker 0 (127.0.0.1:{port}) cannot listen on port {port} of its machine: Could not start gRPC server."
    )
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr


@pytest.mark.cluster
@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_come_is_named(rank):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    done = classify(config, "--start_timeout=3")
    absent = f"worker {1 - rank} ({addresses[1 - rank]})"
    assert done.returncode == PEER_LOST, done.stderr
    assert f"error: {absent} did not join within 3 s (--start_timeout)" in done.stderr
