"""Facts about a machine that only TensorFlow can determine, collected in a separate process.

That process may be noisy, hang, or crash - TensorFlow's wheels die of an illegal instruction on a CPU without
AVX - without harm to `tfpar.doctor`, which starts it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_TIMEOUT_S = 120.0


def probe() -> None:
    """Prints one JSON line `[fact, value]` per fact, until the first failure."""
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"  # a training may be using the GPU

    def tell(name: str, value: Any) -> None:
        print(json.dumps([name, value]), flush=True)

    import tensorflow as tf
    from tensorflow.python.framework import kernels

    tell("tensorflow", tf.__version__)
    build = tf.sysconfig.get_build_info()
    tell("build", {key: build[key] for key in ("is_cuda_build", "cuda_version", "cudnn_version") if key in build})
    tell("nccl", [kernel.device_type for kernel in kernels.get_registered_kernels_for_op("NcclAllReduce").kernel])
    gpus = tf.config.list_physical_devices("GPU")
    tell("gpus", [{k: str(v) for k, v in tf.config.experimental.get_device_details(gpu).items()} for gpu in gpus])
    try:
        import keras

        tell("keras", {"version": keras.__version__, "backend": keras.config.backend()})
    except Exception as error:  # whatever a missing backend raises
        tell("keras", {"error": f"{type(error).__name__}: {error}"})
    try:
        library = importlib.import_module("tfpar_ops.library")
        facts = library.build_facts()
        built = {key: facts[key] for key in ("cuda", "cuda_capabilities") if key in facts}
        tell("ops", {"status": library.library().status, "built": built})
    except Exception as error:
        tell("ops", {"error": f"{type(error).__name__}: {error}"})
    try:
        transport = importlib.import_module("tfpar_ops.transport_library")
        tell("transport", {"gloo": transport.transport_library().gloo})
    except Exception as error:
        tell("transport", {"error": str(error)})
    for device in ["CPU:0", *(f"GPU:{index}" for index in range(len(gpus)))]:
        started = time.monotonic()
        with tf.device(device):
            square = tf.function(lambda x: tf.reduce_sum(tf.matmul(x, x)), jit_compile=True)
            value = float(square(tf.ones((8, 8))))
        tell("xla", {"device": device, "right": value == 512.0, "seconds": time.monotonic() - started})


class Probe:
    """The running process of `probe`; `facts` waits for it."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        # Without TF_CONFIG: looking at TensorFlow must not start its server.
        environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tfpar.doctor.probe"],
            env={**environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def facts(self) -> dict[str, Any]:
        """The facts from the probe; `xla` is a list; `error` describes its failure, if it failed."""
        facts: dict[str, Any] = {"xla": []}
        try:
            told, noise = self._popen.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            told, noise = self._popen.communicate()
            noise += f"\nno answer within {_TIMEOUT_S:.0f} s"
        for line in told.splitlines():
            with contextlib.suppress(ValueError):
                name, value = json.loads(line)
                if name == "xla":
                    facts["xla"].append(value)
                else:
                    facts[name] = value
        code = self._popen.returncode
        if code != 0:
            last = next((line.strip() for line in reversed(noise.splitlines()) if line.strip()), "no output")
            facts["error"] = f"{signal.Signals(-code).name}: {last}" if code < 0 else last
        return facts


if __name__ == "__main__":
    probe()
