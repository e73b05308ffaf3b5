"""Packaging of tfpar, and the build of its native library, `tfpar_ops/libtfpar_ops.so`.

`pip install .`, `pip install -e .`, `pip wheel .` and `make setup` compile the C++ sources with `g++` against the
TensorFlow of the environment and, where `nvcc` is found, the CUDA sources as well. Objects are kept in
`build/tfpar_ops`; only what changed is compiled again. Environment variables:

  CXX                the C++ compiler
  NVCC, CUDA_HOME    where to look for nvcc, before the PATH and /usr/local/cuda
  TFPAR_CUDA=0|1     leave the GPU kernels out, or fail where they cannot be built
  TFPAR_CUDA_ARCHITECTURES="8.0 9.0"
                     compute capabilities to compile for, each of which takes a minute or more; by default all that
                     are known. GPUs later than the last are served too, from its PTX; an earlier one
                     by the next lower of the same major version
  TFPAR_OPS_BUILD=0  install without the library: the reference in plain TensorFlow operations takes its place
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fcntl
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

# Bounds: the training step builds on parts of TensorFlow and Keras that are not public API (each use names the version
# it was read in), so a new minor version is a new version to test, not one to drift into.
INSTALL = [
    "tensorflow>=2.21,<2.22",  # pyproject.toml has the same bounds, for the build
    "keras>=3.15,<3.16",
    "tensorflow-datasets>=4.9.9,<5",
    "absl-py>=2.1,<3",
    "tensorboard>=2.20,<2.22",
    "numpy>=1.26,<3",
    "filelock>=4.2,<5",
    "safetensors>=0.5,<1",  # checkpoints: bytes with a JSON header, nothing that can execute
    "scikit-learn>=1.5,<2",  # ships the digits data set
    "pillow>=10,<14",  # TFDS decodes and TensorBoard encodes images with it
]
ONNX = ["tf2onnx>=1.16,<2", "onnxruntime>=1.20,<2"]
TEST = [
    *ONNX,
    "hypothesis>=6.100,<7",
    "import-linter>=2.1,<3",
    "mypy>=1.14,<3",
    "pytest>=8.3,<10",
    "pytest-timeout>=2.3,<3",
    "pytest-xdist>=3.6,<4",
    "ruff==0.17.5",  # exact: another version formats differently
]

ROOT = pathlib.Path(__file__).resolve().parent
OBJECTS = ROOT / "build" / "tfpar_ops"
LIBRARY = "tfpar_ops/libtfpar_ops.so"
FACTS = "tfpar_ops/libtfpar_ops.json"  # what the library was built for; tfpar_ops reads it before it loads the library

# The codecs: one source compiled for three instruction sets, of which codec.cc picks one when the library is loaded.
# Products and sums must not be fused, or the three would differ in the last bit.
CORE = ("codec.cc", "codec_baseline.cc", "codec_v3.cc", "codec_v4.cc", "crc32c.cc")
CORE_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
V3_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
V4_FLAGS = (*V3_FLAGS, *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")), "-mprefer-vector-width=512")
CPU_TARGETS = {
    "codec_baseline.cc": ("baseline", ()),
    "codec_v3.cc": ("x86-64-v3", V3_FLAGS),
    "codec_v4.cc": ("x86-64-v4", V4_FLAGS),
}

OPS = ("ops/codec_ops.cc", "kernels/cpu_kernels.cc")
GPU_OPS = ("kernels/gpu_kernels.cc",)

# PTX of 9.0 serves every later GPU; denormals are zeros and nothing is fused, as on the CPU.
CUDA = ("encode.cu", "decode.cu", "recode.cu", "norms.cu")
CUDA_FLAGS = (
    *("-O3", "-std=c++17", "-ftz=true", "-fmad=false", "-prec-div=true", "-prec-sqrt=true"),
    *("-Werror", "all-warnings", "-Xcompiler", "-fPIC,-Wall,-fvisibility=hidden"),
)
CUDA_ARCHITECTURES = ("75", "80", "86", "89", "90")


def say(line: str) -> None:
    """A line of the build log."""
    print(f"tfpar_ops: {line}", flush=True)


def output_of(*command: str, **options: object) -> str:
    """Standard output and errors of a command."""
    result = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **options
    )
    return result.stdout


@dataclasses.dataclass(frozen=True)
class Compiler:
    """The C++ compiler, with TensorFlow's flags."""

    path: str
    version: str
    tensorflow: str
    cxx11_abi: int
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    @classmethod
    def find(cls) -> Compiler:
        """Asks the environment.

        Raises:
          PlatformError: No compiler or no TensorFlow, with what to install.
        """
        name = os.environ.get("CXX", "g++")
        path = shutil.which(name)
        if path is None:
            raise PlatformError(
                f"tfpar_ops is C++, and there is no compiler {name!r} here. Install one (Debian: apt-get install g++) "
                "or name one with CXX. TFPAR_OPS_BUILD=0 installs without the library; the codecs are then slow."
            )
        code = (
            "import json, tensorflow as tf; print(json.dumps([tf.__version__, tf.sysconfig.CXX11_ABI_FLAG, "
            "tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()]))"
        )
        quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
        said = output_of(sys.executable, "-c", code, env=quiet).strip().splitlines()
        try:
            version, abi, compile_flags, link_flags = json.loads(said[-1])
        except (IndexError, ValueError) as error:
            raise PlatformError(
                "tfpar_ops is built against TensorFlow, which this Python cannot import: "
                f"{said[-1] if said else 'no message'}. Install it first, or leave --no-build-isolation out."
            ) from error
        # TensorFlow's own headers are not for us to warn about, nor to follow when looking for what changed.
        compile_flags = [
            flag for part in compile_flags for flag in (["-isystem", part[2:]] if part[:2] == "-I" else [part])
        ]
        first_line = output_of(path, "--version").splitlines()[0]
        return cls(path, first_line, version, abi, tuple(compile_flags), tuple(link_flags))


def capability(number: str) -> str:
    """What nvcc numbers `75`, as NVIDIA writes it: `7.5`."""
    return f"{number[:-1]}.{number[-1]}"


def wanted_architectures() -> tuple[str, ...]:
    """The GPUs to compile for, as nvcc numbers them, the oldest first.

    Raises:
      PlatformError: `TFPAR_CUDA_ARCHITECTURES` names one that the kernels were not written for.
    """
    asked = re.findall(r"[^\s,;]+", os.environ.get("TFPAR_CUDA_ARCHITECTURES", ""))
    numbers = {name.replace(".", "") for name in asked}
    if unknown := sorted(numbers.difference(CUDA_ARCHITECTURES)):
        known = ", ".join(map(capability, CUDA_ARCHITECTURES))
        raise PlatformError(
            f"tfpar_ops: TFPAR_CUDA_ARCHITECTURES names {', '.join(unknown)}; known are {known} (later GPUs run the "
            "PTX of the last), or leave it out for all of them"
        )
    return tuple(number for number in CUDA_ARCHITECTURES if not numbers or number in numbers)


@dataclasses.dataclass(frozen=True)
class Nvcc:
    """The CUDA compiler."""

    path: str
    version: str
    architectures: tuple[str, ...]
    link_flags: tuple[str, ...]

    @classmethod
    def find(cls) -> Nvcc | None:
        """The compiler, or None with a line that says why.

        Raises:
          PlatformError: With TFPAR_CUDA=1, where it is not found or not complete.
        """
        wanted = os.environ.get("TFPAR_CUDA", "")
        problem = "TFPAR_CUDA=0"
        if wanted != "0":
            homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
            names = [
                os.environ.get("NVCC", ""),
                *(f"{home}/bin/nvcc" for home in homes),
                "nvcc",
                "/usr/local/cuda/bin/nvcc",
            ]
            path = next((found for name in names if name and (found := shutil.which(name))), None)
            problem = "nvcc was not found (NVCC, CUDA_HOME, PATH, /usr/local/cuda)"
            if path is not None:
                found = cls._ask(path)
                if found.architectures and found.link_flags:
                    capabilities = ", ".join(found.capabilities)
                    say(f"GPU kernels: CUDA {found.version}, compute capability {capabilities} and later")
                    return found
                problem = f"{path} knows none of our GPUs, or comes without libcudart_static.a"
        if wanted == "1":
            raise PlatformError(f"tfpar_ops: TFPAR_CUDA=1, but {problem}")
        say(f"no GPU kernels: {problem}")
        return None

    @classmethod
    def _ask(cls, path: str) -> Nvcc:
        version = re.search(r"release ([\d.]+)", output_of(path, "--version"))
        known = output_of(path, "--list-gpu-arch").split()
        dry_run = output_of(path, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null")
        libraries = re.search(r"LIBRARIES=(.*)", dry_run)
        folders = [flag[2:] for flag in shlex.split(libraries[1])] if libraries else []
        folder = next((folder for folder in folders if (pathlib.Path(folder) / "libcudart_static.a").exists()), None)
        return cls(
            path,
            version[1] if version else "unknown",
            tuple(number for number in wanted_architectures() if f"compute_{number}" in known),
            (f"-L{folder}", "-lcudart_static", "-ldl", "-lrt", "-lpthread") if folder else (),
        )

    @property
    def capabilities(self) -> list[str]:
        """Compute capabilities, as `7.5`."""
        return list(map(capability, self.architectures))

    def flags(self) -> list[str]:
        """Of every CUDA source: code for each GPU we know, and PTX of the last for those to come."""
        flags = [*CUDA_FLAGS]
        for number in self.architectures:
            code = f"[sm_{number},compute_{number}]" if number == self.architectures[-1] else f"sm_{number}"
            flags += ["-gencode", f"arch=compute_{number},code={code}"]
        return flags


@dataclasses.dataclass(frozen=True)
class Step:
    """Compiles one source.

    Attributes:
      source: Relative to tfpar_ops.
      command: All but source and object.
      signature: What the object depends on besides files: the command and versions.
    """

    source: str
    command: tuple[str, ...]
    signature: str

    @property
    def object(self) -> pathlib.Path:
        """Where the result is kept."""
        return OBJECTS / (self.source.replace("/", "_") + ".o")

    def is_done(self) -> bool:
        """Whether the object is there, made by the same command, and no file that went into it is younger."""
        record, listing = self.object.with_suffix(".command"), self.object.with_suffix(".d")
        if not (self.object.exists() and listing.exists() and record.exists()) or record.read_text() != self.signature:
            return False
        made = self.object.stat().st_mtime
        files = listing.read_text().partition(":")[2].replace("\\\n", " ").replace("\\ ", "\0").split()
        paths = [ROOT / name.replace("\0", " ") for name in files]
        return all(path.exists() and path.stat().st_mtime <= made for path in paths)

    def run(self) -> None:
        """Compiles.

        Raises:
          CompileError: With everything that the compiler said.
        """
        say(f"compiling {self.source}")
        record, listing = self.object.with_suffix(".command"), self.object.with_suffix(".d")
        record.unlink(missing_ok=True)
        command = [*self.command, "-MMD", "-MF", str(listing), "-c", f"tfpar_ops/{self.source}", "-o", str(self.object)]
        began = time.time()
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            raise CompileError(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")
        sys.stderr.write(result.stderr)
        os.utime(self.object, (began, began))  # a source that was changed meanwhile is younger
        record.write_text(self.signature)


def steps(compiler: Compiler, nvcc: Nvcc | None) -> list[Step]:
    """What has to be compiled, the slowest first."""
    plain = (compiler.path, "-std=c++17", "-O3", "-fPIC", "-Wall", "-I.")
    x86 = platform.machine() in ("x86_64", "AMD64")
    version = f"{compiler.version}; TensorFlow {compiler.tensorflow}"
    # Not the folder in which TensorFlow lies: pip's isolated builds have a new one each time.
    operations = (*plain, *compiler.compile_flags)
    signature = [flag for flag in compiler.compile_flags if not flag.startswith("/")]
    found = []
    if nvcc is not None:
        command = (nvcc.path, *nvcc.flags(), "-ccbin", compiler.path, "-I.", "-Itfpar_ops")
        found += [Step(f"core/cuda/{name}", command, shlex.join([nvcc.version, version, *command])) for name in CUDA]
    for name in (*OPS, *(GPU_OPS if nvcc else ())):
        found.append(Step(name, operations, shlex.join([version, *signature, *plain])))
    for name in CORE:
        command = (*plain, *CORE_FLAGS, *(CPU_TARGETS[name][1] if x86 and name in CPU_TARGETS else ()))
        found.append(Step(f"core/{name}", command, shlex.join([version, *command])))
    return found


def build(jobs: int) -> tuple[pathlib.Path, pathlib.Path]:
    """Brings the library up to date.

    Args:
      jobs: Compilers that run at the same time.

    Returns:
      The library, and the file that says what it was built for.
    """
    OBJECTS.mkdir(parents=True, exist_ok=True)
    with (OBJECTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compiler, library, facts = (
            Compiler.find(),
            OBJECTS / pathlib.Path(LIBRARY).name,
            OBJECTS / pathlib.Path(FACTS).name,
        )
        nvcc = Nvcc.find()
        all_steps = steps(compiler, nvcc)
        missing = [step for step in all_steps if not step.is_done()]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(Step.run, missing))
        text = json.dumps(describe(compiler, nvcc), indent=2) + "\n"
        if missing or not library.exists() or not facts.exists() or facts.read_text() != text:
            say(f"linking {library.name} for TensorFlow {compiler.tensorflow}")
            link = [compiler.path, "-shared", "-o", str(library), *(str(step.object) for step in all_steps)]
            link += [*compiler.link_flags, "-Wl,--exclude-libs,ALL", *(nvcc.link_flags if nvcc else ())]
            facts.unlink(missing_ok=True)
            result = subprocess.run(link, capture_output=True, text=True, check=False)
            if result.returncode:
                raise CompileError(f"{shlex.join(link)}\n{result.stdout}{result.stderr}")
            facts.write_text(text)
    return library, facts


def describe(compiler: Compiler, nvcc: Nvcc | None) -> dict[str, object]:
    """What the library is built for."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    return {
        "tensorflow": compiler.tensorflow,
        "cxx11_abi": compiler.cxx11_abi,
        "compiler": compiler.version,
        "cpu_targets": [name for name, _ in CPU_TARGETS.values()] if x86 else ["baseline"],
        "cuda": nvcc.version if nvcc else None,
        "cuda_capabilities": nvcc.capabilities if nvcc else [],
    }


class BuildNative(build_ext):
    """Builds the library as if it were an extension module: setuptools then knows when, and where it goes."""

    def run(self) -> None:
        """Builds, and puts the library beside the Python sources (editable) or into the wheel to be."""
        jobs = int(self.parallel or len(os.sched_getaffinity(0)))
        folder = ROOT if self.inplace else pathlib.Path(self.build_lib)
        for made, name in zip(build(jobs), (LIBRARY, FACTS), strict=True):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # Replaced rather than overwritten: a running program has the old one mapped.
            beside = target.with_name(f".{target.name}.new")
            shutil.copy2(made, beside)
            beside.replace(target)

    def get_outputs(self) -> list[str]:
        """Files that this command makes."""
        return [str(pathlib.Path(self.build_lib) / name) for name in (LIBRARY, FACTS)]

    def get_output_mapping(self) -> dict[str, str]:
        """For an editable install: which file beside the sources stands for which one in a wheel."""
        return dict(zip(self.get_outputs(), (LIBRARY, FACTS), strict=True)) if self.inplace else {}


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
    return Extension(
        "tfpar_ops.libtfpar_ops",
        [name for name in files if name.endswith((".cc", ".cu"))],
        depends=[name for name in files if name.endswith((".h", ".cuh"))],
    )


if __name__ == "__main__":
    setup(
        name="tfpar",
        version="0.1.0",
        description="TensorFlow-native parallel training for Keras 3: one custom loop from one device to a cluster",
        long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        license="Apache-2.0",
        python_requires=">=3.11,<3.14",
        packages=find_packages(include=["tfpar", "tfpar.*", "tfpar_ops", "tfpar_ops.*"]),
        package_data={"tfpar": ["py.typed"], "tfpar_ops": ["py.typed", "FORMAT.md"]},
        ext_modules=[] if os.environ.get("TFPAR_OPS_BUILD") == "0" else [extension()],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
        install_requires=INSTALL,
        extras_require={"onnx": ONNX, "test": TEST},
    )
