"""A worker whose cable is pulled: no connection is reset, nothing arrives any more. A link that is merely full."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import time

from experiments.benchmarks import netns
from tests import nursery
from tfpar.process.exit_codes import PEER_LOST
from tfpar_ops.transport_library import why_unusable

import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(netns.missing()), reason=netns.missing()),
]
ROOT = pathlib.Path(__file__).parents[2]
HOSTS, CUT_OFF, PEER_TIMEOUT = 3, 2, 8
# What `ip netns exec` would do, in a process that has imported TensorFlow already.
ON_HOST = """
import ctypes, os, runpy, sys
del sys.argv[0]
namespace = os.open(f"/var/run/netns/{sys.argv.pop(0)}", os.O_RDONLY)
if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
    raise OSError(ctypes.get_errno(), "setns")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(hosts, rank, folder, *flags):
    addresses = [f"{hosts.address(host)}:2222" for host in range(len(hosts.namespaces))]
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    environ = {**os.environ, "TF_CONFIG": json.dumps(config), "TF_NUM_INTRAOP_THREADS": "1"}
    command = [
        *(sys.executable, "-u", "-c", ON_HOST, hosts.namespaces[rank]),
        *("experiments/image_classification.py", "--model=mlp", "--global_batch_size=48"),
        *("--eval_every=1000000", f"--peer_timeout={PEER_TIMEOUT}", "--jit_compile=false"),
        *(f"--workdir={folder / 'run'}", *flags),
    ]
    log = open(folder / f"{rank}.log", "wb")  # noqa: SIM115 - the process writes to it
    return nursery.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)


@contextlib.contextmanager
def running(hosts, folder, *flags):
    workers = [start(hosts, rank, folder, *flags) for rank in range(len(hosts.namespaces))]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "transport",
    [
        pytest.param("tensorflow", marks=[] if why_unusable() else pytest.mark.proof),  # the default is one of the two
        pytest.param(
            "gloo",
            marks=pytest.mark.skipif(bool(why_unusable()), reason="the transport over Gloo is not built here"),
        ),
    ],
)
def test_a_partition_is_noticed_and_named_on_both_sides(tmp_path, transport):
    flags = ["--steps=1000000", "--checkpoint_every=50", "--exchange=int4", f"--transport={transport}"]
    with netns.network(HOSTS) as hosts, running(hosts, tmp_path, *flags) as workers:
        deadline = time.monotonic() + 600  # not about how long a start takes on a busy machine
        while not list((tmp_path / "run" / "checkpoints").glob("step-*")):
            assert all(worker.poll() is None for worker in workers)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        hosts.connect(CUT_OFF, False)
        # Far beyond the bound, to tell "never" from "late on a busy machine".
        codes = [worker.wait(timeout=10 * PEER_TIMEOUT) for worker in workers]
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(HOSTS)]
    assert codes == [PEER_LOST] * HOSTS, logs
    for rank, log in enumerate(logs):
        assert "error: lost worker " in log, log
        if rank != CUT_OFF:
            assert f"error: lost worker {CUT_OFF} (" in log, log
    assert "error: lost worker 0 (" in logs[CUT_OFF]  # who keeps the heartbeats


@pytest.mark.timeout(300)
def test_heartbeats_do_not_wait_behind_gradients(tmp_path):
    flags = ["--model_args=widths=[1500,1500]", "--steps=2", "--exchange=none"]
    with netns.network(2) as hosts:
        # Eight seconds for the gradients of a step, where an unanswered heartbeat may be two seconds old.
        hosts.shape("10mbit")
        with running(hosts, tmp_path, *flags) as workers:
            codes = [worker.wait(timeout=200) for worker in workers]
    assert codes == [0, 0], [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
