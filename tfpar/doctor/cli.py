"""Is this machine, and this cluster, fit to train? `python -m tfpar.doctor`.

A line per check: ok, warn (it works, but not as well as it could) or FAIL (training will not work), with a way
out. The exit code is 1 if anything is a FAIL. On all machines of a cluster at the same time, e.g. with
`srun python -m tfpar.doctor`, every doctor listens on its own address, so that each pair of machines is tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shutil
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfpar import cluster
from tfpar.cluster import port_filter
from tfpar.config import ConfigError
from tfpar.doctor.checks import FAIL, OK, WARN, Check, check_tensorflow
from tfpar.doctor.probe import Probe
from tfpar.process.activity import activity
from tfpar.process.command_line import Parser, end_with_reader, seconds_problem
from tfpar.process.cores import cores
from tfpar.process.memory import main_memory
from tfpar.process.writable import nearest_existing, write_error

_SHOWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLIBC_TUNABLES",
    "KERAS_BACKEND",
    "OMP_NUM_THREADS",
    "TFDS_DATA_DIR",
    "TF_DETERMINISTIC_OPS",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TF_NUM_INTRAOP_THREADS",
    "TF_USE_LEGACY_KERAS",
    "TF_XLA_FLAGS",
    "XLA_FLAGS",
)


# The machine.


def check_python() -> Check:
    """Python's version."""
    return Check("python", OK, f"{platform.python_version()} ({sys.executable})")


def check_cpu() -> Check:
    """Model, usable cores and vector instructions."""
    usable = cores()
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    flags = facts.get("flags", "").split()
    vectors = [name for name in ("avx2", "avx512f", "amx_bf16") if name in flags]
    model = facts.get("model name") or platform.processor() or platform.machine()
    detail = f"{model}, {usable} of {os.cpu_count()} cores usable" + (f", {' '.join(vectors)}" if vectors else "")
    if flags and "avx2" not in flags:
        return Check("cpu", WARN, f"{detail}, no AVX2", "Training on this CPU is slow; TensorFlow needs at least AVX.")
    return Check("cpu", OK, detail)


def describe_machine() -> str:
    """Hardware, versions and date of a measurement, in one line; imports TensorFlow into this process."""
    import keras
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in gpus]
    devices = ", ".join(names) if names else check_cpu().detail
    return f"{devices}; TensorFlow {tf.__version__}, Keras {keras.__version__}; {datetime.date.today().isoformat()}"


def check_memory() -> Check:
    """Main memory, within the limit of the container if there is one."""
    memory = main_memory()
    if memory is None:
        return Check("memory", OK, "unknown on this system")
    free, total = memory
    detail = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB available"
    if free < 2 * 2**30:
        return Check(
            "memory", WARN, detail, "Two local workers need about 2 GiB; end other programs or raise the limit."
        )
    return Check("memory", OK, detail)


def check_data_dir(path: str) -> Check:
    """Whether the directory of the data sets can be written."""
    folder = Path(path or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    if found := write_error(folder):
        detail = f"{folder} cannot be written: {found[1].strerror}"
        return Check("data_dir", FAIL, detail, "Give --data_dir, or set TFDS_DATA_DIR.")
    existing = nearest_existing(folder)
    free = shutil.disk_usage(existing).free
    detail = f"{folder}{'' if existing == folder else ' (does not exist yet)'}, {free / 2**30:.0f} GiB free"
    if free < 2**30:
        return Check("data_dir", WARN, detail, "Free some space, or point TFDS_DATA_DIR at a larger disk.")
    return Check("data_dir", OK, detail)


def check_environment() -> Check:
    """The environment variables that change what TensorFlow and Keras do."""
    found = {name: os.environ[name] for name in _SHOWN_VARIABLES if name in os.environ}
    detail = (
        ", ".join(f"{name}={value}" for name, value in found.items()) or "no variable changes TensorFlow's behaviour"
    )
    if found.get("TF_USE_LEGACY_KERAS", "0") not in ("0", "false", "False"):
        return Check("environment", WARN, detail, "tfpar uses Keras 3: unset TF_USE_LEGACY_KERAS.")
    return Check("environment", OK, detail)


# The cluster.


class Listener:
    """Listens on this process's own address while the doctors of the others try it.

    Attributes:
      error: Why it cannot; empty if it does.
      answers_on: The addresses that it answers on, in words; empty where these are all.
      open_because: Why these are all.
    """

    def __init__(self, info: cluster.ClusterInfo) -> None:
        self.error = self.answers_on = self.open_because = ""
        self._expected = sum(map(len, info.cluster.values())) - 1 - len(info.cluster.get("evaluator", ()))
        self._heard = threading.Semaphore(0)
        host, _, port = info.address.rpartition(":")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        self._server = socket.socket(family, socket.SOCK_STREAM)
        if not port:  # an evaluator outside the cluster has no address
            return
        try:
            self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._server.bind(("", int(port)))
            try:  # as it will be in a training
                self.answers_on = port_filter.describe(addresses := port_filter.own_addresses(host))
                port_filter.attach(self._server.fileno(), addresses)
            except port_filter.StillOpenError as reason:
                self.open_because = str(reason)
            self._server.listen(128)
        except OSError as error:
            self.error = f"port {port} cannot be opened here: {error.strerror}"
            return
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self._server.accept()[0].close()
                self._heard.release()

    def close(self, wait: float) -> None:
        """Stops once everyone has called, or after `wait` seconds."""
        deadline = time.monotonic() + wait
        for _ in range(0 if self.error else self._expected):
            self._heard.acquire(timeout=max(0.0, deadline - time.monotonic()))
        self._server.close()


def check_cluster(timeout: float) -> Iterator[Check]:
    """The role of this process, and whether it reaches its peers within `timeout` seconds."""
    try:
        info = cluster.detect()
        port_filter.is_open()
    except ConfigError as error:
        yield Check("cluster", FAIL, str(error), "Correct it, or unset it to train on this machine alone.")
        return
    if info is None:
        hint = " (a Slurm job, but no step of several tasks)" if "SLURM_JOB_ID" in os.environ else ""
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            hint = " (a Kubernetes pod without TFPAR_WORKER_HOSTS)"
        yield Check("cluster", OK, f"none: no TF_CONFIG, Slurm step or Kubernetes job{hint}")
        return
    yield Check("cluster", OK, info.describe())
    listener = Listener(info)
    peers = cluster.check_reachable(info, timeout)
    listener.close(timeout)
    if listener.error:
        yield Check("own port", WARN, listener.error, "Unless a training runs here now, choose another port.")
    elif info.address:
        yield _check_own_port(info.address.rpartition(":")[2], listener)
    yield from map(_check_peer, peers)


def _check_own_port(port: str, listener: Listener) -> Check:
    """Who can reach TensorFlow's server, which has no authentication."""
    if not listener.open_because:
        return Check(
            "own port", OK, f"TensorFlow binds {port} on all addresses; tfpar admits only {listener.answers_on}"
        )
    return Check(
        "own port",
        WARN,
        f"TensorFlow binds {port} on all addresses and tfpar cannot filter them: {listener.open_because}",
        "Name the machine by an address of its own in the cluster's description, or restrict access with a firewall.",
    )


def _check_peer(peer: cluster.Peer) -> Check:
    name, where = peer.task, peer.address
    if peer.state == "connected":
        return Check(name, OK, f"{where} reached in {peer.milliseconds:.1f} ms")
    if peer.state == "refused":
        return Check(
            name,
            WARN,
            f"{where}: the machine answers, but nothing listens on the port",
            "Normal before training starts. To test the ports, run the doctor on all machines at the same time.",
        )
    if peer.state == "unknown_host":
        return Check(name, FAIL, f"{where}: {peer.detail}", "Use a name that this machine resolves, or an IP address.")
    return Check(name, FAIL, f"{where}: {peer.detail}", "Is the machine up, and does its firewall let the port in?")


# The report.


def examine(data_dir: str = "", timeout: float = 5.0) -> list[Check]:
    """All checks, in the order of the report.

    Args:
      data_dir: Where data sets are kept; empty for the default of TFDS.
      timeout: Seconds for peers to answer.
    """
    running = Probe()
    try:
        machine = [check_python(), check_cpu(), check_memory(), check_data_dir(data_dir), check_environment()]
        peers = list(check_cluster(timeout))
    finally:
        facts = running.facts()
    return [*machine, *check_tensorflow(facts), *peers]


def report(checks: Sequence[Check], colours: bool) -> str:
    """The table for people."""
    marks = {OK: "32", WARN: "33", FAIL: "1;31"}
    column = max(len(check.name) for check in checks) + 2
    indent = " " * (column + 6)
    width = max(60, min(120, shutil.get_terminal_size().columns))
    lines = []
    for check in checks:
        status = f"\x1b[{marks[check.status]}m{check.status:<4}\x1b[0m" if colours else f"{check.status:<4}"
        texts = [check.detail, *([f"-> {check.fix}"] if check.fix else [])]
        wrapped = [line for text in texts for line in textwrap.wrap(text, width - len(indent)) or [""]]
        lines.append(f"{check.name:<{column}}{status}  " + f"\n{indent}".join(wrapped))
    fails, warns = (sum(check.status == status for check in checks) for status in (FAIL, WARN))
    verdict = "not fit to train" if fails else "fit to train"
    lines.append(f"{verdict}: {len(checks)} checks, {warns} warning{'s' * (warns != 1)}, {fails} FAIL")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, program: str = "python -m tfpar.doctor") -> int:
    """The command line; returns the exit code.

    Args:
      argv: What follows the program's name; by default from this process.
      program: How a user calls it.
    """
    parser = Parser(prog=program, description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.add_argument("--data_dir", default="", help="where data sets are kept (default: that of TFDS)")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for peers to answer (default: 5)")
    values = parser.parse_args(argv)
    if problem := seconds_problem("--timeout", values.timeout):
        parser.error(problem)
    with activity("checking machine, TensorFlow and cluster", shown=not values.json, in_logs=False):
        checks = examine(values.data_dir, values.timeout)
    healthy = all(check.status != FAIL for check in checks)
    end_with_reader()
    if values.json:
        print(json.dumps({"ok": healthy, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    else:
        print(report(checks, sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0 if healthy else 1
