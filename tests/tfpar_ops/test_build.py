"""The build of the native library, and what becomes of a library that is missing or made for something else."""

from __future__ import annotations

import builtins
import ctypes
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import tfpar_ops
from tfpar_ops import codecs, library

import pytest
import tensorflow as tf
from setuptools.errors import CompileError, PlatformError

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tfpar_ops"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """setup.py, without its call of `setup`."""
    spec = importlib.util.spec_from_file_location("tfpar_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def built() -> None:
    if not (PACKAGE / library.FILE).exists():
        pytest.skip("the native library is not built here")


def python(code: str, folder: pathlib.Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that finds tfpar_ops in a folder."""
    return subprocess.run(
        [sys.executable, "-W", "always::RuntimeWarning", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# Which implementation is in use


@pytest.mark.usefixtures("built")
def test_the_status_says_what_the_library_is_for():
    assert tfpar_ops.uses_library() == (os.environ.get("TFPAR_OPS") != "reference")
    if not tfpar_ops.uses_library():
        return
    status = tfpar_ops.library_status()
    assert re.fullmatch(
        rf"native operations for TensorFlow {re.escape(tf.__version__)}: "
        r"CPU (baseline|x86-64-v3|x86-64-v4), (CUDA \d+\.\d+|no GPU kernels)",
        status,
    )


def test_importing_the_package_does_not_import_tensorflow():
    code = "import sys, tfpar_ops; tfpar_ops.Codec('sign'); print('tensorflow' in sys.modules)"
    assert python(code).stdout == "False\n"
    with pytest.raises(AttributeError, match="no attribute 'encod'"):
        tfpar_ops.encod  # noqa: B018


def test_public_names_exist():
    assert sorted(tfpar_ops.__all__, key=lambda name: (not name.isupper(), name)) == tfpar_ops.__all__
    assert all(callable(getattr(tfpar_ops, name)) for name in tfpar_ops.__all__ if name != "FORMATS")
    assert tfpar_ops.FORMATS


_ROUND_TRIP = """
import tensorflow as tf, tfpar_ops
codec = tfpar_ops.Codec("int4")
x, variable = tf.sin(tf.range(1000.0)), tf.Variable(tf.zeros([1000]))
for number in range(2):
    made = tfpar_ops.encode_into(variable, [x], codec)
assert made.residual is None
again = tfpar_ops.recode_into(variable, made.payload, codec, 1000)
decoded = tfpar_ops.decode(made.payload, codec, [[1000]])[0]
print(tfpar_ops.library_status())
print(tf.reduce_sum(tf.abs(decoded)).numpy(), *made.norms.numpy().round(4), *again.norms.numpy().round(4))
"""


@pytest.mark.usefixtures("built")
def test_the_reference_can_be_asked_for():
    """Without a warning, and it computes the same."""
    reference, native = python(_ROUND_TRIP, TFPAR_OPS="reference"), python(_ROUND_TRIP, TFPAR_OPS="native")
    assert reference.returncode == native.returncode == 0, reference.stderr + native.stderr
    assert "Warning" not in reference.stderr + native.stderr
    (status, *numbers), (native_status, *native_numbers) = reference.stdout.splitlines(), native.stdout.splitlines()
    assert status == "reference operations (TFPAR_OPS=reference)"
    assert native_status.startswith("native operations")
    assert len(numbers) == 1
    assert numbers == native_numbers


def test_a_choice_that_does_not_exist(monkeypatch):
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setenv("TFPAR_OPS", "cuda")
    with pytest.raises(ValueError, match="TFPAR_OPS='cuda' is not one of native, reference"):
        tfpar_ops.library_status()


def test_a_target_that_does_not_exist(monkeypatch):
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setenv("TFPAR_OPS_TARGET", "avx2")
    with pytest.raises(ValueError, match="TFPAR_OPS_TARGET='avx2' is not one of baseline, x86-64-v3, x86-64-v4"):
        tfpar_ops.library_status()


@pytest.mark.usefixtures("built")
def test_a_target_is_used_or_its_absence_told(monkeypatch):
    """In a process of its own: the library chooses once."""
    code = "import tfpar_ops; print(tfpar_ops.library_status())"
    lowest = python(code, TFPAR_OPS="native", TFPAR_OPS_TARGET="baseline")
    assert "CPU baseline" in lowest.stdout
    assert "Warning" not in lowest.stderr
    highest = python(code, TFPAR_OPS="native", TFPAR_OPS_TARGET="x86-64-v4")
    assert ("CPU x86-64-v4" in highest.stdout) != (
        "TFPAR_OPS_TARGET=x86-64-v4: this processor or build of the library does not have it" in highest.stderr
    )


def test_the_targets_are_those_of_the_core():
    named = re.findall(r'"(baseline|x86-64-v\d)"', (PACKAGE / "core" / "codec.h").read_text())
    assert sorted(named) == sorted(library.CPU_TARGETS)


def test_facts_of_a_library_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert library.build_facts() == {}
    (tmp_path / library.FILE).touch()
    (tmp_path / library.FACTS).write_text('{"cuda": "12.5"}')
    assert library.build_facts() == {"cuda": "12.5"}


@pytest.fixture
def copy(tmp_path) -> pathlib.Path:
    """A folder with a copy of the package and its library."""
    package = tmp_path / "tfpar_ops"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("core", "kernels", "ops", "__pycache__"))
    return package


@pytest.mark.usefixtures("built")
def test_a_library_for_another_tensorflow_is_not_loaded(copy):
    """It is not even opened: this one is no library at all. One warning, then the reference does the work."""
    facts = json.loads((copy / library.FACTS).read_text())
    (copy / library.FACTS).write_text(json.dumps({**facts, "tensorflow": "2.20.0"}))
    (copy / library.FILE).write_bytes(b"not a library")
    reason = f"the native library was built for TensorFlow 2.20.0, and this is {tf.__version__}."
    result = python(_ROUND_TRIP, copy.parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == f"reference operations: {reason}"
    assert result.stderr.count("RuntimeWarning") == 1
    assert f"tfpar_ops: {reason} `make setup`" in result.stderr
    assert "<string>:6: RuntimeWarning" in result.stderr  # it points at the caller

    insisting = python(_ROUND_TRIP, copy.parent, TFPAR_OPS="native")
    assert insisting.returncode == 1
    assert f"LibraryError: {reason}" in insisting.stderr


@pytest.mark.usefixtures("built")
def test_why_a_library_cannot_be_used(copy):
    def reason() -> str:
        with pytest.raises(library.LibraryError) as caught:
            library.load(copy)
        return str(caught.value)

    facts = (copy / library.FACTS).read_text()
    wrong_abi = json.dumps({**json.loads(facts), "cxx11_abi": 0})
    (copy / library.FACTS).write_text(wrong_abi)
    assert reason() == "the native library was built for the C++ ABI 0, and this is 1."
    for broken in ("", "[]", "{"):
        (copy / library.FACTS).write_text(broken)
        assert "what the native library was built for" in reason()
    (copy / library.FACTS).unlink()
    assert "cannot be read" in reason()
    (copy / library.FACTS).write_text(facts)
    (copy / library.FILE).write_bytes(b"not a library")
    assert "does not load" in reason()
    (copy / library.FILE).unlink()
    assert reason() == "the native library is not built."


@pytest.mark.usefixtures("built")
def test_a_library_of_other_sources_is_not_used(copy):
    """Whatever it lacks is said, and with what it is built anew; what was loaded before goes on to be used."""
    source, facts = copy / "stale.c", (copy / library.FACTS).read_text()
    functions = {"tfpar_cpu_target": 0, "tfpar_masked_crc32c": 0, "tfpar_abi_version": library.ABI_VERSION - 1}

    def build(folder: pathlib.Path, names: Iterable[str]) -> None:
        folder.mkdir(exist_ok=True)
        (folder / library.FACTS).write_text(facts)
        source.write_text("\n".join(f"int {name}(void) {{ return {functions[name]}; }}" for name in names))
        (folder / library.FILE).unlink(missing_ok=True)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / library.FILE, source], check=True)

    # What is loaded is known by its path: a folder for each.
    for lacking, reason in (
        ("tfpar_abi_version", "it has no tfpar_abi_version"),
        ("tfpar_cpu_target", "it has no tfpar_cpu_target"),
        ("", f"its interface is {library.ABI_VERSION - 1}, not {library.ABI_VERSION}"),
    ):
        folder = copy.parent / f"without {lacking}"
        build(folder, functions.keys() - {lacking})
        with pytest.raises(library.LibraryError) as caught:
            library.load(folder)
        assert str(caught.value) == f"the native library was built from other sources than this code: {reason}."
    for _ in range(2):
        assert library.load(PACKAGE).operations is not None
    build(copy, functions)

    insisting = python("import tfpar_ops; tfpar_ops.library_status()", copy.parent, TFPAR_OPS="native")
    assert insisting.returncode == 1
    assert f"LibraryError: {caught.value} `make setup` (in a checkout)" in insisting.stderr


def test_interface_and_code_have_the_same_numbers():
    (number,) = re.findall(r"#define TFPAR_ABI_VERSION (\d+)", (PACKAGE / "core" / "codec.h").read_text())
    assert int(number) == library.ABI_VERSION
    text = (PACKAGE / "core" / "cuda" / "codec_cuda.h").read_text()
    assert re.findall(r"#define TFPAR_CUDA_MAX_PEERS (\d+)", text) == [str(codecs.GPU_PEERS)]


# What is built


@pytest.mark.usefixtures("built")
def test_the_facts_are_those_of_this_environment():
    facts = json.loads((PACKAGE / library.FACTS).read_text())
    assert facts["tensorflow"] == tf.__version__
    assert facts["cxx11_abi"] == tf.sysconfig.CXX11_ABI_FLAG
    assert "baseline" in facts["cpu_targets"]
    assert bool(facts["cuda"]) == bool(facts["cuda_capabilities"])


@pytest.mark.usefixtures("built")
def test_the_library_exports_the_c_interface():
    core = ctypes.CDLL(str(PACKAGE / library.FILE))
    names = re.findall(r"\b(tfpar_\w+)\(", (PACKAGE / "core" / "codec.h").read_text())
    assert len(names) >= 9
    for name in names:
        assert getattr(core, name)


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_a_wheel_carries_the_library(tmp_path):
    """Made as `pip wheel .` makes it, from the objects that `make setup` has left."""
    command = ["wheel", str(ROOT), "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-m", "pip", *command], capture_output=True, text=True, timeout=550, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"tfpar-[\d.]+-py3-none-\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        facts = json.loads(archive.read(f"tfpar_ops/{library.FACTS}"))
    assert {f"tfpar_ops/{library.FILE}", "tfpar_ops/FORMAT.md", "tfpar_ops/py.typed", "tfpar_ops/__init__.py"} <= names
    assert facts["tensorflow"] == tf.__version__
    assert not [name for name in names if name.endswith((".cc", ".cu", ".o"))]


def test_the_build_asks_for_the_tensorflow_that_is_installed(build):
    """pip's isolated builds take the bounds of pyproject.toml; a library for another TensorFlow would not be loaded."""
    (bounds,) = re.findall(r'^requires = .*"(tensorflow[^"]*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert bounds in build.INSTALL


def test_every_source_is_compiled(build):
    """What lies in the folders and what setup.py names are the same."""
    named = {*build.OPS, *build.GPU_OPS, *(f"core/{name}" for name in build.CORE)}
    named |= {f"core/cuda/{name}" for name in build.CUDA}
    folders = [PACKAGE / name for name in ("ops", "kernels", "core", "core/cuda")]
    found = {str(path.relative_to(PACKAGE)) for folder in folders for path in folder.glob("*.c[cu]")}
    assert named == found


class Bazel(dict):
    """BUILD, read as the Python that its Starlark is too: targets with what they say, for x86-64."""

    def __init__(self) -> None:
        super().__init__(glob=self.glob, select=lambda choices: choices["@platforms//cpu:x86_64"])
        self.targets: dict[str, dict[str, Any]] = {}
        exec(compile((ROOT / "BUILD").read_text(), "BUILD", "exec"), self)

    def __missing__(self, name: str) -> Callable[..., None]:
        if name in vars(builtins):
            raise KeyError(name)
        return lambda *_, **options: self.targets.update({options["name"]: options} if "name" in options else {})

    @staticmethod
    def glob(patterns: list[str], exclude: Sequence[str] = ()) -> list[str]:
        found = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}
        return sorted(found - {str(path.relative_to(ROOT)) for pattern in exclude for path in ROOT.glob(pattern)})

    def copts(self, name: str) -> list[str]:
        return self.targets[name].get("copts", [])

    def sources(self, *names: str) -> set[str]:
        """C++ sources of targets, relative to tfpar_ops."""
        files = [file for name in names for file in self.targets[name]["srcs"] if file.endswith(".cc")]
        return {file.removeprefix("tfpar_ops/") for file in files}


def test_bazel_builds_the_same(build):
    """Sources, and the flags that bits depend on; but for the GPU's, which it compiles for the processor alone."""
    bazel = Bazel()
    core = ["core", *(name for name in bazel.targets if re.fullmatch("codec_(baseline|v.)", name))]
    assert bazel.sources(*core) == {f"core/{name}" for name in build.CORE}
    assert bazel.sources("tfpar_ops/libtfpar_ops.so") == set(build.OPS)
    assert bazel.copts("core") == ["-O3", *build.CORE_FLAGS]
    for name, (_, flags) in build.CPU_TARGETS.items():
        assert bazel.copts(name.removesuffix(".cc")) == ["-O3", *build.CORE_FLAGS, *flags]
    emulated = {file for file in bazel.targets["cuda_emulation_test"]["srcs"] if file.startswith("emulated_")}
    assert emulated == {f"emulated_{name.removesuffix('.cu')}.cc" for name in build.CUDA}
    generated = {file for target in bazel.targets.values() for file in target.get("outs", [])}
    assert emulated == {file for file in generated if file.startswith("emulated_")}


def test_the_tests_of_the_core_build_the_same(build):
    """Sources and flags of tests/native, as make sees them."""

    def values(makefile: str, *names: str) -> list[list[str]]:
        text = "print:;@true " + " ".join(f"$(info $({name}))" for name in names)
        command = ["make", "--no-print-directory", "-f", makefile, f"--eval={text}", "NVCC=no-such-compiler", "print"]
        result = subprocess.run(command, cwd=ROOT / "tests" / "native", capture_output=True, text=True, check=True)
        return [line.split() for line in result.stdout.splitlines()]

    sources, flags, v3, v4 = values("flags.mk", "CODECS", "CORE_FLAGS", "V3", "V4")
    assert {f"{name}.cc" for name in sources} == set(build.CORE)
    assert flags == ["-std=c++17", "-O3", *build.CORE_FLAGS]
    assert v3 == list(build.V3_FLAGS)
    assert v4 == list(build.V4_FLAGS)
    kernels, cuda_flags = values("cuda/Makefile", "KERNELS", "NVCCFLAGS")
    assert {f"{name}.cu" for name in kernels} == set(build.CUDA)
    bits_depend_on = [flag for flag in build.CUDA_FLAGS if not flag.startswith("-fPIC")]
    assert cuda_flags[: len(bits_depend_on) - 1] == bits_depend_on[:-1]


def test_only_what_changed_is_compiled_again(build, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "OBJECTS", tmp_path / "build dir")
    source, header = tmp_path / "tfpar_ops" / "core" / "a.cc", tmp_path / "tfpar_ops" / "core" / "a b.h"
    for folder in (source.parent, build.OBJECTS):
        folder.mkdir(parents=True)
    source.write_text('#include "a b.h"\nint main() { return kValue; }\n')
    header.write_text("constexpr int kValue = 1;\n")
    step = build.Step("core/a.cc", ("g++", "-O0"), "g++ -O0")
    assert not step.is_done()
    step.run()
    assert capfd.readouterr().out == "tfpar_ops: compiling core/a.cc\n"
    assert step.is_done()
    assert not build.Step("core/a.cc", ("g++", "-O2"), "g++ -O2").is_done()

    later = time.time() + 60
    os.utime(header, (later, later))
    assert not step.is_done()
    os.utime(header, (0, 0))
    assert step.is_done()
    header.unlink()
    assert not step.is_done()
    with pytest.raises(CompileError, match=r"a b\.h: No such file"):
        step.run()
    header.write_text("constexpr int kValue = 2;\n")
    assert not step.is_done()  # the failure has left nothing that counts


def test_without_a_compiler_the_message_says_what_to_install(build, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        PlatformError, match=r"no compiler 'no-such-compiler'.*apt-get install g\+\+.*TFPAR_OPS_BUILD=0"
    ):
        build.Compiler.find()


def test_gpu_kernels_are_left_out_with_a_line_that_says_why(build, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TFPAR_CUDA", "0")
    assert build.Nvcc.find() is None
    assert capsys.readouterr().out == "tfpar_ops: no GPU kernels: TFPAR_CUDA=0\n"

    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.delenv("TFPAR_CUDA")
    assert build.Nvcc.find() is None
    assert "no GPU kernels: nvcc was not found" in capsys.readouterr().out
    monkeypatch.setenv("TFPAR_CUDA", "1")
    with pytest.raises(PlatformError, match="TFPAR_CUDA=1, but nvcc was not found"):
        build.Nvcc.find()


def test_an_nvcc_that_knows_only_some_gpus(build, monkeypatch, tmp_path, capsys):
    """The last one it knows is also there as PTX, for those to come."""
    (tmp_path / "libcudart_static.a").touch()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        '#!/bin/sh\ncase "$1" in\n--version) echo "release 11.2, V11.2.1";;\n'
        '--list-gpu-arch) printf "compute_75\\ncompute_80\\ncompute_86\\n";;\n'
        f'--dryrun) echo \'#$ LIBRARIES=  "-L{tmp_path}/stubs" "-L{tmp_path}"\' >&2;;\nesac\n'
    )
    nvcc.chmod(0o755)
    for name in ("TFPAR_CUDA", "TFPAR_CUDA_ARCHITECTURES", "NVCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = build.Nvcc.find()
    assert found.path == str(nvcc)
    assert found.version == "11.2"
    assert found.flags()[-6:] == [
        *("-gencode", "arch=compute_75,code=sm_75"),
        *("-gencode", "arch=compute_80,code=sm_80"),
        *("-gencode", "arch=compute_86,code=[sm_86,compute_86]"),
    ]
    assert f"-L{tmp_path}" in found.link_flags
    assert "GPU kernels: CUDA 11.2, compute capability 7.5, 8.0, 8.6 and later" in capsys.readouterr().out
    for asked in ("8.0", "80", "8.0, 9.0"):
        monkeypatch.setenv("TFPAR_CUDA_ARCHITECTURES", asked)
        assert build.Nvcc.find().flags()[-2:] == ["-gencode", "arch=compute_80,code=[sm_80,compute_80]"]
    monkeypatch.setenv("TFPAR_CUDA_ARCHITECTURES", "8.0;5.2")
    with pytest.raises(PlatformError, match=r"names 52; known are 7\.5, 8\.0, 8\.6, 8\.9, 9\.0 .*leave it out"):
        build.Nvcc.find()
    monkeypatch.delenv("TFPAR_CUDA_ARCHITECTURES")
    (tmp_path / "libcudart_static.a").unlink()
    assert build.Nvcc.find() is None
    assert "comes without libcudart_static.a" in capsys.readouterr().out
