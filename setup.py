"""Packaging of tfpar, and the build of its native libraries, `tfpar_ops/libtfpar_ops.so` and `libtfpar_transport.so`.

`pip install .`, `pip install -e .`, `pip wheel .` and `make setup` compile the C++ sources against the TensorFlow of
the environment; where `nvcc` is found the CUDA sources as well, and where Gloo is found the transport between workers.
CMakeLists.txt says how; only what changed is compiled again, in `build/tfpar_ops`. Environment variables:

  CXX                the C++ compiler
  NVCC, CUDA_HOME    where to look for nvcc, before the PATH and /usr/local/cuda
  TFPAR_CUDA=0|1     leave the GPU kernels out, or fail where they cannot be built
  TFPAR_CUDA_ARCHITECTURES="8.0 9.0"
                     compute capabilities to compile for, each of which takes a minute or more; by default all known
                     ones. GPUs later than the last run its PTX; an earlier one runs the code of the next lower
                     capability of the same major version
  TFPAR_GLOO=0|1     leave the transport over Gloo out, or fail where it cannot be built
  GLOO_HOME          where to look for Gloo, before the system's folders
  TFPAR_OPS_BUILD=0  install without the library: the reference in plain TensorFlow operations takes its place
  TFPAR_LOCAL_VERSION=1
                     name the TensorFlow in the version, as in 0.2.0+tf2.21; `make wheels` does
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

# Bounds: the training step builds on parts of TensorFlow and Keras that are not public API (each use names the version
# it was read in), so a new minor version is a new version to test, not one to drift into.
INSTALL = [
    "tensorflow>=2.19,<2.22",  # pyproject.toml has the same bounds, for the build
    "keras>=3.15,<3.16",
    "tensorflow-datasets>=4.9.9,<5",
    "absl-py>=2.1,<3",
    "tensorboard>=2.19,<2.22",
    "numpy>=1.26,<3",
    "ml-dtypes>=0.5,<1",  # bfloat16 and float8 in NumPy; TensorFlow brings it
    "filelock>=4.2,<5",
    "safetensors>=0.5,<1",  # checkpoints: bytes with a JSON header, nothing that can execute
    "scikit-learn>=1.5,<2",  # ships the digits data set
    "pillow>=10.1,<14",  # TFDS decodes and TensorBoard encodes images with it
]
RL = ["gymnasium>=1.2,<2"]  # plays saved policies
# Stepped by threads in C++. Wheels of 1.2 need 600 MB of assets, also for environments that have none.
ENVPOOL = [*RL, "envpool>=1.1,<1.2"]
ONNX = ["tf2onnx>=1.16,<2", "onnxruntime>=1.20,<2"]
TABLES = ["pyarrow>=18,<27"]  # CSV and Parquet files
PRIVACY = ["dp-accounting>=0.6,<0.7"]  # epsilon of federations with noise
# Transport of real federations. Flower 1.42 asks for protobuf below 7, with which TensorFlow 2.21 works; it is no part
# of `test`, where other packages bring protobuf 7.
FEDERATED = ["flwr>=1.42,<1.45"]
HUB = ["keras-hub>=0.32,<0.33"]  # presets for experiments/finetune.py
PROFILE = ["xprof>=2.20,<3"]  # TensorBoard's tab PROFILE
WANDB = ["wandb>=0.19,<1"]
# The client, which `mlflow` brings as well, and what it needs for mlflow.db, where nobody names a server.
MLFLOW = ["mlflow-skinny>=2.20,<4", "sqlalchemy>=2,<3", "alembic>=1.13,<2", "sqlparse>=0.5,<1"]
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1.0,<2"]
NOTEBOOK = ["ipykernel>=6.29,<8", "matplotlib>=3.9,<4"]
TEST = [
    *NOTEBOOK,
    *ONNX,
    *PRIVACY,
    *MLFLOW,
    *PROFILE,
    *TABLES,
    *WANDB,
    *HUB,
    *ENVPOOL,
    "cmake>=3.28,<5",  # pyproject.toml has the same bounds, for the build
    "hypothesis>=6.100,<7",
    "import-linter>=2.1,<3",
    "mypy>=1.14,<3",
    "types-protobuf>=5.29,<8",  # envpool needs it too
    "nbclient>=0.10,<1",
    "ninja>=1.11,<2",
    "playwright>=1.49,<2",  # drives the distribution's Chromium; it downloads no browser of its own
    "pytest>=8.3,<10",
    "pytest-timeout>=2.3,<3",
    "pytest-xdist>=3.6,<4",
    "pyyaml>=6,<7",
    "ruff==0.17.5",  # exact: another version formats differently
]

ROOT = pathlib.Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.*)"$', (ROOT / "tfpar" / "__init__.py").read_text(), re.MULTILINE)[1]
# Of the models that `tfpar train` trains; tfpar/config/recipes is a link to experiments/recipes.
RECIPES = ["recipes/quickstart.flags", "recipes/language_model.flags"]
LIBRARY = "tfpar_ops/libtfpar_ops.so"
TRANSPORT = "tfpar_ops/libtfpar_transport.so"  # made where Gloo is
FACTS = "tfpar_ops/libtfpar_ops.json"  # what the library was built for and from; read before the library is loaded


def bound_to_tensorflow(version: str, install: list[str]) -> tuple[str, list[str]]:
    """Version and requirements of a package that holds the library, which runs with the TensorFlow of its build alone.

    pip may build in an environment of its own, with another TensorFlow than the one that is installed: the requirement
    makes it install the one that fits, or say that it cannot.

    Args:
      version: The version of tfpar.
      install: The requirements of tfpar in general.
    """
    try:
        tensorflow = importlib.metadata.version("tensorflow")
    except importlib.metadata.PackageNotFoundError:  # a source distribution is made; a build says what is missing
        return version, install
    if os.environ.get("TFPAR_LOCAL_VERSION") == "1":
        version += f"+tf{'.'.join(tensorflow.split('.')[:2])}"
    bound = [f"tensorflow=={tensorflow}" if each.startswith("tensorflow>") else each for each in install]
    if tensorflow.startswith(("2.19.", "2.20.")):
        # They bring TensorBoard 2.19 and 2.20, which import pkg_resources; setuptools 82 removed it.
        bound.append("setuptools<82")
    if tensorflow.startswith("2.19."):
        # TFDS asks for any; later ones are generated for protobuf 6, and TensorFlow 2.19 takes protobuf 5 at most.
        bound.append("tensorflow-metadata<1.18")
    return version, bound


def tool(name: str, package: str = "") -> str:
    """The path of a program, from this Python's environment or the PATH.

    Raises:
      PlatformError: It is not installed, with what to install.
    """
    path = shutil.which(
        name, path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if path is None:
        way = f"pip install {package}" if package else f"Debian: apt-get install {name}, or name another one with CXX"
        raise PlatformError(
            f"tfpar_ops is C++, and there is no {name!r} here. Install it ({way}). TFPAR_OPS_BUILD=0 installs without "
            "the library; the codecs are then slow."
        )
    return path


def tensorflow_options() -> list[str]:
    """What CMake must know of TensorFlow, as `-D` options.

    Raises:
      PlatformError: This Python has no TensorFlow.
    """
    code = (
        "import json, tensorflow as tf; print(json.dumps([tf.__version__, tf.sysconfig.CXX11_ABI_FLAG, "
        "tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()]))"
    )
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    lines = (result.stdout if result.returncode == 0 else result.stderr).strip().splitlines()
    if result.returncode:
        raise PlatformError(
            "tfpar_ops is built against TensorFlow, which this Python cannot import: "
            f"{lines[-1] if lines else 'no message'}. Install it first, or leave --no-build-isolation out."
        )
    version, abi, compile_flags, link_flags = json.loads(lines[-1])
    include = [flag[2:] for flag in compile_flags if flag.startswith("-I")]
    values = {
        "VERSION": version,
        "INCLUDE": ";".join(include),
        "FLAGS": " ".join(flag for flag in compile_flags if not flag.startswith("-I")),
        "LINK_FLAGS": " ".join(link_flags),
    }
    return [f"-DTFPAR_CXX11_ABI={abi}", *(f"-DTFPAR_TENSORFLOW_{name}={value}" for name, value in values.items())]


def build(jobs: int) -> dict[str, pathlib.Path]:
    """Brings the libraries up to date.

    Args:
      jobs: Compilers that run at the same time.

    Returns:
      The libraries, and the file that says what they were built for, by their names in the package. The one of the
      transport may not exist.

    Raises:
      CompileError: CMake or a compiler failed; its output is on the terminal.
    """
    folder = ROOT / "build" / "tfpar_ops"
    folder.mkdir(parents=True, exist_ok=True)
    cmake, ninja = tool("cmake", "cmake"), tool("ninja", "ninja")
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += [f"-DCMAKE_CXX_COMPILER={tool(os.environ.get('CXX', 'g++'))}", *tensorflow_options()]
    configure += [f"-DTFPAR_CUDA={os.environ.get('TFPAR_CUDA') or 'auto'}"]
    configure += [f"-DTFPAR_GLOO={os.environ.get('TFPAR_GLOO') or 'auto'}"]
    configure += [f"-DTFPAR_CUDA_ARCHITECTURES={os.environ.get('TFPAR_CUDA_ARCHITECTURES', '')}"]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Ninja has none: two builds in one folder would overwrite each other's files
        # Another compiler needs a fresh cache (CMake drops other variables with the old one); objects stay.
        record = folder / "configured_with"
        variables = [f"{name}={os.environ.get(name, '')}" for name in ("NVCC", "CUDA_HOME", "CUDA_PATH", "GLOO_HOME")]
        wanted = "\n".join([*configure, *variables])
        fresh = not record.exists() or record.read_text() != wanted
        record.unlink(missing_ok=True)
        run([*configure, *(["--fresh"] if fresh else [])])
        record.write_text(wanted)
        run([cmake, "--build", str(folder), "--parallel", str(jobs)])
    return {name: folder / pathlib.Path(name).name for name in (LIBRARY, TRANSPORT, FACTS)}


def run(command: list[str]) -> None:
    """Runs one step of the build and shows what tfpar's build files print, or everything if it fails.

    Raises:
      CompileError: The command failed.
    """
    environ = {**os.environ, "NINJA_STATUS": "tfpar_ops: [%f/%t] "}
    output = []
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            output.append(line)
            if (shown := line.removeprefix("-- ")).startswith("tfpar_ops: "):
                print(shown, end="", flush=True)
    if process.returncode:
        raise CompileError("".join(output))


class BuildNative(build_ext):
    """Builds the library as if it were an extension module: setuptools then knows when, and where it goes."""

    def run(self) -> None:
        """Builds, and puts the libraries beside the Python sources (editable) or into the wheel to be."""
        jobs = int(self.parallel or len(os.sched_getaffinity(0)))
        folder = ROOT if self.inplace else pathlib.Path(self.build_lib)
        # Taken before the build: what is edited meanwhile may not be in it.
        sources = runpy.run_path(str(ROOT / "tfpar_ops" / "built_for.py"))["sources_digest"](ROOT / "tfpar_ops")
        for name, made in build(jobs).items():
            target = folder / name
            if not made.exists():
                target.unlink(missing_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            # Replaced rather than overwritten: a running program has the old one mapped.
            beside = target.with_name(f".{target.name}.new")
            shutil.copy2(made, beside)
            if name == FACTS:
                beside.write_text(json.dumps({**json.loads(made.read_text()), "sources": sources}, indent=2) + "\n")
            beside.replace(target)

    def get_outputs(self) -> list[str]:
        """Files that this command makes."""
        return [str(pathlib.Path(self.build_lib) / name) for name in self._names()]

    def get_output_mapping(self) -> dict[str, str]:
        """For an editable install: which file beside the sources stands for which one in a wheel."""
        return dict(zip(self.get_outputs(), self._names(), strict=True)) if self.inplace else {}

    def _names(self) -> list[str]:
        folder = ROOT if self.inplace else pathlib.Path(self.build_lib)
        return [name for name in (LIBRARY, TRANSPORT, FACTS) if name != TRANSPORT or (folder / name).exists()]


class Wheel(bdist_wheel):
    """The library is bound to a platform and a TensorFlow, not to a version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform in the name of the wheel."""
        python, abi, system = super().get_tag()
        return ("py3", "none", system) if self.distribution.has_ext_modules() else (python, abi, system)


def extension() -> Extension:
    """Names the sources, so that a source distribution carries them."""
    code = (ROOT / "tfpar_ops").rglob("*")
    files = sorted(str(path.relative_to(ROOT)) for path in code if path.suffix in (".cc", ".h", ".cu", ".cuh"))
    recipe = ["CMakeLists.txt", "cmake/nvcc.cmake", "cmake/gloo.cmake", "tfpar_ops/CMakeLists.txt"]
    return Extension(
        "tfpar_ops.libtfpar_ops",
        [name for name in files if name.endswith((".cc", ".cu"))],
        depends=[*recipe, *(name for name in files if name.endswith((".h", ".cuh")))],
    )


if __name__ == "__main__":
    NATIVE = os.environ.get("TFPAR_OPS_BUILD") != "0"
    if NATIVE and "sdist" not in sys.argv:
        VERSION, INSTALL = bound_to_tensorflow(VERSION, INSTALL)
    setup(
        name="tfpar",
        version=VERSION,
        description="TensorFlow-native parallel training for Keras 3: one custom loop from one device to a cluster",
        long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        license="Apache-2.0",
        python_requires=">=3.11,<3.14",
        packages=find_packages(include=["tfpar", "tfpar.*", "tfpar_ops", "tfpar_ops.*"]),
        entry_points={"console_scripts": ["tfpar = tfpar.commands.cli:main"]},
        package_data={
            "tfpar": ["py.typed"],
            "tfpar.config": RECIPES,
            "tfpar_ops": ["py.typed", "FORMAT.md"],
        },
        ext_modules=[extension()] if NATIVE else [],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
        install_requires=INSTALL,
        extras_require={
            "docs": DOCS,
            "envpool": ENVPOOL,
            "federated": FEDERATED,
            "hub": HUB,
            "mlflow": MLFLOW,
            "notebook": NOTEBOOK,
            "onnx": ONNX,
            "privacy": PRIVACY,
            "profile": PROFILE,
            "rl": RL,
            "tables": TABLES,
            "test": TEST,
            "wandb": WANDB,
        },
    )
