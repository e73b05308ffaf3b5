"""Checks of TensorFlow, Keras, GPUs and the native operations, from the facts that `tfpar.doctor.probe` collects."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

OK, WARN, FAIL = "ok", "warn", "FAIL"
# The releases that setup.py allows, the one that is tested most last.
TESTED = {"tensorflow": ("2.19", "2.20", "2.21"), "keras": ("3.15",)}
# Oldest Linux driver, by major version, that runs programs built with a major version of CUDA (NVIDIA's release notes,
# "minor version compatibility").
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_BACKEND_FIX = 'Set KERAS_BACKEND=tensorflow, or "backend": "tensorflow" in ~/.keras/keras.json.'


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
      name: What was checked.
      status: `ok`, `warn` or `FAIL`.
      detail: What was found.
      fix: The remedy, unless all is well.
    """

    name: str
    status: str
    detail: str
    fix: str = ""


def check_tensorflow(facts: dict[str, Any]) -> Iterator[Check]:
    """Everything about TensorFlow, Keras and GPUs, from the facts of the probe."""
    error = facts.get("error", "")
    if "tensorflow" not in facts:
        fix = "Run `make setup`."
        if "SIGILL" in error:
            fix = "This CPU lacks AVX, which TensorFlow's wheels need."
        elif "backend" in error:  # TensorFlow 2.21 imports Keras, which then cannot start
            fix = _BACKEND_FIX
        yield Check("tensorflow", FAIL, f"cannot be imported: {error}", fix)
        return
    yield _check_version("tensorflow", facts["tensorflow"])
    yield from _check_keras(facts.get("keras", {"error": error}))
    installed = _nvidia_smi()
    yield from _check_gpus(facts, installed)
    wrong = [f"{result['device']} computes wrong results" for result in facts["xla"] if not result["right"]]
    if error or wrong or not facts["xla"]:
        problem = ", ".join(wrong) or error or "not tried"
        yield Check("xla", FAIL, problem, "Train with --jit_compile=false; on a GPU, update the driver.")
    else:
        times = ", ".join(f"{result['device']} {result['seconds']:.1f} s" for result in facts["xla"])
        yield Check("xla", OK, f"compiles and computes correctly ({times})")
    ops = facts.get("ops", {"error": error})
    if "error" in ops:
        fix = "Run `make setup`, which installs and builds it."
        if "was built for TensorFlow" in ops["error"]:
            fix = "Do one of these."
        elif "TFPAR_OPS" in ops["error"]:
            fix = "Unset the variable, or give it one of these values."
        yield Check("tfpar_ops", FAIL, ops["error"], fix)
    else:
        yield Check("tfpar_ops", OK, ops["status"])
        if "built" in ops:
            yield _check_ops_cuda(ops["built"], facts, installed)
    transport = facts.get("transport", {"error": "not tried"})
    if "gloo" in transport:
        found = (
            f"--transport=auto takes NCCL between GPUs that it can connect, else the native one (Gloo "
            f"{transport['gloo']}), where all workers have it"
        )
    else:
        found = f"--transport=auto takes TensorFlow's: the native one cannot be used: {transport['error']}"
    yield Check("transport", OK, found)


def _check_version(name: str, version: str) -> Check:
    tested = TESTED[name]
    if ".".join(version.split(".")[:2]) in tested:
        return Check(name, OK, version)
    status = FAIL if version.split(".")[0] != tested[-1].split(".")[0] else WARN
    return Check(name, status, f"{version}, tested with {', '.join(tested)}", f"pip install '{name}=={tested[-1]}.*'")


def _check_keras(keras: dict[str, Any]) -> Iterator[Check]:
    if "error" in keras:
        yield Check("keras", FAIL, keras["error"], f"{_BACKEND_FIX} If Keras is missing, run `make setup`.")
        return
    yield _check_version("keras", keras["version"])
    backend = keras["backend"]
    yield Check(
        "keras backend", OK if backend == "tensorflow" else FAIL, backend, _BACKEND_FIX * (backend != "tensorflow")
    )


def _check_gpus(facts: dict[str, Any], installed: list[str]) -> Iterator[Check]:
    seen = facts.get("gpus", [])
    names = [
        f"{gpu.get('device_name', 'GPU')} (compute capability {gpu.get('compute_capability', '?')})" for gpu in seen
    ]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if seen:
        memory = f"; memory and driver: {'; '.join(installed)}" if installed else ""
        yield Check("gpu", OK, ", ".join(names) + memory)
    elif installed and not hidden:
        yield Check(
            "gpu",
            FAIL,
            f"TensorFlow sees none of {len(installed)}: {'; '.join(installed)}",
            "Install the CUDA libraries (pip install 'tensorflow[and-cuda]'), or train on the CPU "
            "(CUDA_VISIBLE_DEVICES=-1).",
        )
    else:
        yield Check(
            "gpu", OK, "hidden by CUDA_VISIBLE_DEVICES; the CPU trains" if installed else "none; the CPU trains"
        )
    build = facts.get("build", {})
    if build.get("is_cuda_build"):
        yield Check("cuda", OK, f"TensorFlow is built for CUDA {build['cuda_version']}, cuDNN {build['cudnn_version']}")
    else:
        yield Check("cuda", FAIL if installed and not hidden else OK, "TensorFlow is built without CUDA")
    if facts.get("nccl"):
        yield Check("nccl", OK, "kernels present")
    else:
        status = WARN if len(seen) > 1 else OK
        yield Check("nccl", status, "no kernels; several GPUs would communicate through the CPU")


def _check_ops_cuda(built: dict[str, Any], facts: dict[str, Any], installed: list[str]) -> Check:
    """Whether the GPU kernels of tfpar_ops run with this TensorFlow, on these GPUs and their driver.

    Args:
      built: What setup.py noted beside the library: `cuda`, `cuda_capabilities`; empty where there is none.
      facts: Of the probe.
      installed: From `_nvidia_smi`.
    """
    name, gpus = "tfpar_ops cuda", facts.get("gpus", [])
    theirs = facts.get("build", {}).get("cuda_version", "")
    build_again = f"nvcc of CUDA {theirs or 'of TensorFlow'} on the PATH, or CUDA_HOME, then `make setup`."
    if not built.get("cuda"):
        if gpus:
            found = "no GPU kernels: codecs of gradients on GPUs run as plain TensorFlow operations, or on the CPU"
            return Check(name, WARN, found, f"Put {build_again}")
        return Check(name, OK, "no GPU kernels; there is no GPU that needs them")
    ours = built["cuda"]
    detail = f"built with CUDA {ours}" + (f", TensorFlow with {theirs}" if theirs else ", TensorFlow without CUDA")
    if not gpus:
        return Check(name, OK, f"{detail}; there is no GPU here to run them")
    capabilities = built.get("cuda_capabilities") or ["0.0"]
    without = [gpu for gpu in gpus if not _has_kernels(_capability(gpu), capabilities)]
    if without:
        shown = ", ".join(gpu.get("device_name", "GPU") for gpu in without)
        found = f"{detail}, for compute capability {', '.join(capabilities)} and later: no kernels for {shown}"
        return Check(
            name,
            FAIL,
            found,
            "Build again without TFPAR_CUDA_ARCHITECTURES (python setup.py build_ext --inplace), hide this GPU with "
            "CUDA_VISIBLE_DEVICES, or train with --exchange=none.",
        )
    versions = (re.match(r"\d+", line.rpartition(", ")[2]) for line in installed)
    major, drivers = int(ours.split(".")[0]), [int(found[0]) for found in versions if found]
    needed = _OLDEST_DRIVER.get(major)
    if needed and drivers and min(drivers) < needed:
        found = f"{detail}; its kernels need driver {needed} or later, and this machine has {min(drivers)}"
        return Check(name, FAIL, found, f"Update the driver, or build with TensorFlow's CUDA: {build_again}")
    if theirs and major != int(theirs.split(".")[0]) and not (needed and drivers):
        needs = f"driver {needed} or later" if needed else f"a driver for CUDA {major}"
        found = f"{detail}: a major version other than TensorFlow's; it needs {needs}"
        return Check(
            name, WARN, found, f"Check the driver with nvidia-smi, or build with TensorFlow's CUDA: {build_again}"
        )
    return Check(name, OK, detail)


def _has_kernels(capability: tuple[int, ...], built: list[str]) -> bool:
    """Machine code runs on GPUs of its major version and no lower minor version; PTX of the last on all later ones."""
    known = sorted(tuple(map(int, number.split("."))) for number in built)
    return capability >= known[-1] or any(own[0] == capability[0] and own <= capability for own in known)


def _capability(gpu: dict[str, str]) -> tuple[int, ...]:
    """The compute capability of a GPU as TensorFlow describes it, "(9, 0)"; the highest possible if it is unknown."""
    found = tuple(int(part) for part in re.findall(r"\d+", gpu.get("compute_capability", "")))
    return found or (999,)


def _nvidia_smi() -> list[str]:
    """Name, memory and driver of each GPU that the driver shows; what it does not know is a word such as [N/A]."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        if result.returncode == 0:
            return [line.strip() for line in result.stdout.splitlines() if line.strip()]
    return []
