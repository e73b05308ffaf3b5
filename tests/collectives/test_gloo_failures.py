"""Failures of one worker end the calls of the other, without a word from its process; two workers in one process."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from tfpar.cluster import failure, own_failure
from tfpar.cluster.info import ClusterInfo
from tfpar.collectives import gloo_mesh
from tfpar_ops.transport_library import transport_library, why_unusable

import pytest
import tensorflow as tf

pytestmark = pytest.mark.skipif(bool(why_unusable()), reason="the transport over Gloo is not built here")

WORKERS = [ClusterInfo("test", {"worker": ("a:1", "b:1")}, "worker", rank) for rank in range(2)]
GROUP = {"group": 1, "members": [0, 1]}
ELEMENTS = 2048


@pytest.fixture
def meshes() -> Iterator[list[int]]:
    library = transport_library()
    numbers = [library.listen(rank, gloo_mesh._names(WORKERS[0]), "127.0.0.1", "token", 60.0) for rank in range(2)]
    addresses = [library.address(number) for number in numbers]
    connecting = [threading.Thread(target=library.connect, args=(number, addresses)) for number in numbers]
    for thread in connecting:
        thread.start()
    for thread in connecting:
        thread.join()
    yield numbers
    for number in numbers:
        library.close(number)


def errors_of(calls: list[Callable[[], object]]) -> list[tf.errors.OpError]:
    """The errors of calls of workers 0 and 1, in this order, which are made at the same time."""
    errors: dict[int, tf.errors.OpError] = {}

    def attempt(rank: int) -> None:
        try:
            calls[rank]()
        except tf.errors.OpError as error:
            errors[rank] = error

    threads = [threading.Thread(target=attempt, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a worker waits for the other"
    return [errors[0], errors[1]]


def gather(meshes: list[int], rank: int, value: tf.Tensor) -> Callable[[], object]:
    operations = transport_library().operations
    return lambda: operations.tfpar_all_gather(row=value, instance=1, mesh=meshes[rank], place=rank, **GROUP)


def exchange(meshes: list[int], rank: int, *, owned: int) -> Callable[[], object]:
    """An exchange whose residuals are variables, of `owned` elements for the sums."""
    worker, owner = tf.Variable(tf.zeros([ELEMENTS])), tf.Variable(tf.zeros([owned]))
    codec = {"kind": "int8", "block": 512, "keep": 0, "scale": "bf16", "rounding": "nearest"}
    seeds = tf.zeros([2, 2], tf.int64)
    place = {"mesh": meshes[rank], "place": rank, **GROUP}
    operations = transport_library().operations
    return lambda: operations.tfpar_exchange_resource(
        [tf.ones([ELEMENTS])],
        worker.handle,
        owner.handle,
        seed_steps=seeds,
        measures_norms=True,
        instance=1,
        **codec,
        **place,
    )


def check_named(own: tf.errors.OpError, other: tf.errors.OpError, reason: str) -> None:
    """Worker 0 has its own error, and worker 1 names worker 0, of which it asks nothing."""
    assert reason in own.message
    assert "Collective" not in own.message
    assert isinstance(other, tf.errors.UnavailableError)
    assert failure.find_lost(other, WORKERS[1]) == [0]
    text = failure._lost_text(WORKERS[1], [0], other)
    assert text.startswith(f"lost worker 0 (a:1): it failed ({reason}). ")


def test_a_call_that_is_refused_ends_the_call_of_the_other_worker(meshes):
    half = ELEMENTS // 2
    own, other = errors_of([exchange(meshes, 0, owned=half + 512), exchange(meshes, 1, owned=half)])
    check_named(own, other, f"residual: shape [{half + 512}], expected [{half}]")
    assert own_failure.OWN_CALL in own.message
    with pytest.raises(tf.errors.FailedPreconditionError), failure.peer_errors_named(WORKERS[0]):
        raise own


def test_an_error_before_a_call_ends_the_call_of_the_other_worker(meshes):
    own, other = errors_of([gather(meshes, 0, tf.ones([2, 3])), gather(meshes, 1, tf.ones([1, 3]))])
    assert isinstance(own, tf.errors.InvalidArgumentError)
    check_named(own, other, "the first dimension of the input, [2,3], must be 1")


def test_an_error_of_the_program_ends_the_call_of_the_other_worker(meshes):
    def fail() -> None:
        transport_library().abort(meshes[0], "ValueError: a hook", own=True)
        gather(meshes, 0, tf.ones([1, 3]))()

    own, other = errors_of([fail, gather(meshes, 1, tf.ones([1, 3]))])
    assert isinstance(own, tf.errors.InternalError)
    check_named(own, other, "ValueError: a hook")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_process_that_ends_leaves_the_connections_to_its_parent(meshes):
    child = os.fork()
    if child == 0:
        transport_library().close(meshes[0])  # as `atexit` does
        os._exit(0)
    deadline = time.monotonic() + 30
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the process does not end")
        time.sleep(0.01)
    calls = [gather(meshes, rank, tf.fill([1, 3], float(rank))) for rank in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for rows in threads.map(lambda call: call(), calls, timeout=60):
            assert rows.numpy().tolist() == [[0.0] * 3, [1.0] * 3]
