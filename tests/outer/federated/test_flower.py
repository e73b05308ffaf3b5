"""A federation over Flower on loopback: a server and two clients, each a process, with our codecs in its messages.

Flower 1.42 asks for protobuf below 7, and other packages here take 7: where Flower is not installed beside this Python,
the test makes an environment of its own, which has Flower in front of the packages that are here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time

from tests.outer.federated.flower_app import federation
from tfpar.outer.federated import FederatedTrainer

import keras
import numpy as np
import pytest

pytestmark = [pytest.mark.proof, pytest.mark.cluster]

ROOT = pathlib.Path(__file__).parents[3]
APP = pathlib.Path(__file__).parent / "flower_app"
SECONDS = 540.0


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> pathlib.Path:
    """The directory of Flower's commands."""
    given = os.environ.get("TFPAR_FLOWER_ENVIRONMENT")
    if given:
        return pathlib.Path(given) / "bin"
    if importlib.util.find_spec("flwr"):
        return pathlib.Path(sys.executable).parent
    folder = tmp_path_factory.mktemp("flower")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    found = re.search(r'^FEDERATED = \["(.*)"\]', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert found is not None
    subprocess.run([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", found[1]], check=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_a_server_and_two_clients_average_what_a_simulation_does(commands, tmp_path):
    """The same bits travel, so that the weights agree to rounding; each message has the payload of int8."""
    server, *own = free_ports(3)
    app = tmp_path / "app"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{server}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "TFPAR_TEST_WORKDIR": str(tmp_path / "results"),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }

    def start(name: str, *arguments: str) -> subprocess.Popen:
        with (tmp_path / f"{name}{len(started)}.log").open("w") as log:
            return subprocess.Popen(
                [str(commands / name), *arguments], env=environment, stdout=log, stderr=log, cwd=tmp_path
            )

    started: list[subprocess.Popen] = []
    try:
        started.append(start("flower-superlink", "--insecure", f"--port={server}"))
        for number, port in enumerate(own):
            link = f"--superlink=127.0.0.1:{server}"
            node = f"--node-config=partition-id={number}"
            started.append(start("flower-supernode", "--insecure", link, f"--port={port}", node))
        summary = tmp_path / "results" / "summary.json"
        ends, submitted, output = time.monotonic() + SECONDS, False, ""
        while not summary.exists() and time.monotonic() < ends:
            if not submitted:
                sent = subprocess.run(
                    [str(commands / "flwr"), "run", str(app), "here"], env=environment, capture_output=True, text=True
                )
                output, submitted = sent.stdout + sent.stderr, sent.returncode == 0
            time.sleep(1.0)
        logs = "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(tmp_path.glob("*.log")))
        assert summary.exists(), f"{output}\n{logs}"
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.wait(30)
    found = json.loads(summary.read_text())
    assert found["federated"]["clients_trained"] == 4
    # Two kernels as int8 with a scale for each block, two biases as they are.
    assert found["federated"]["bytes_up_per_round"] < 0.5 * found["federated"]["bytes_down_per_round"]

    simulated = {**federation.OPTIONS, "clients": 2, "partition": "by_class:3", "verbose": 0}
    here = FederatedTrainer(federation.build, federation.LOSS, **simulated)
    here.fit(*federation.examples())
    flower = keras.saving.load_model(summary.parent / "model.keras")
    for one, other in zip(flower.get_weights(), here.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert re.fullmatch("[0-9a-f]{64}", found["params_sha256"])
