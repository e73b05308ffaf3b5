"""What CMake compiles and with which flags, Bazel the same, and what it says of a missing nvcc or Gloo."""

from __future__ import annotations

import builtins
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.tfpar_ops.checkout import PACKAGE, ROOT
from tfpar.collectives import gloo

import pytest


def cmake(*arguments: str | pathlib.Path, **environ: str) -> subprocess.CompletedProcess[str]:
    beside = pathlib.Path(sys.executable).parent
    return subprocess.run(
        [shutil.which("cmake", path=f"{beside}{os.pathsep}{os.environ['PATH']}"), *map(str, arguments)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, list[str]]:
    """What CMake compiles without nvcc, and with which flags: the library's sources, relative to tfpar_ops."""
    commands: dict[str, list[str]] = {}
    tensorflow = {"VERSION": "2.21.0", "INCLUDE": "/headers", "LINK_FLAGS": "-ltensorflow"}
    for options in (
        ["-DTFPAR_CXX11_ABI=1", *(f"-DTFPAR_TENSORFLOW_{name}={value}" for name, value in tensorflow.items())],
        ["-DTFPAR_TESTS=ON"],
    ):
        folder = tmp_path_factory.mktemp("cmake")
        result = cmake("-S", ROOT, "-B", folder, "-DTFPAR_CUDA=0", *options)
        assert result.returncode == 0, result.stdout + result.stderr
        for entry in json.loads((folder / "compile_commands.json").read_text()):
            name = os.path.relpath(entry["file"], PACKAGE)
            flags = [flag for flag in shlex.split(entry["command"]) if flag.startswith(("-O", "-f", "-m", "-x"))]
            assert commands.setdefault(name, flags) == flags, name  # the tests compile the codecs as the library does
    return commands


def test_every_source_is_compiled(compiled):
    """What lies in the folders and what CMakeLists.txt names are the same, but for the operations on GPUs."""
    folders = [PACKAGE / name for name in ("ops", "kernels", "core", "core/cuda")]
    files = {str(path.relative_to(PACKAGE)) for folder in folders for path in folder.glob("*.c[cu]")}
    named = {name for name in compiled if not name.startswith("..")}
    transport = {name for name in named if name.startswith("transport/")}
    assert named - transport == files - {"kernels/gpu_kernels.cc"}
    if transport:  # where there is a Gloo
        assert transport == {f"transport/{path.name}" for path in (PACKAGE / "transport").glob("*.cc")}
    assert "kernels/gpu_kernels.cc" in (PACKAGE / "CMakeLists.txt").read_text()


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


def test_bazel_builds_the_same(compiled):
    """Sources, and the flags that bits depend on; but for the GPU's, which it compiles for the processor alone."""
    bazel = Bazel()
    core = ["core", *(name for name in bazel.targets if re.fullmatch("codec_(baseline|v.)", name))]
    assert bazel.sources(*core) == {name for name in compiled if re.fullmatch(r"core/\w+\.cc", name)}
    assert bazel.sources("tfpar_ops/libtfpar_ops.so") == {"ops/codec_ops.cc", "kernels/cpu_kernels.cc"}
    for target in core:
        for source in bazel.sources(target):
            flags = [flag for flag in compiled[source] if flag != "-fPIC"]
            assert [flag for flag in bazel.copts(target) if flag.startswith(("-O", "-f", "-m"))] == flags, source
    emulated = {file for file in bazel.targets["cuda_emulation_test"]["srcs"] if file.startswith("emulated_")}
    cuda = [pathlib.Path(name).stem for name in compiled if name.startswith("core/cuda/")]
    assert emulated == {f"emulated_{name}.cc" for name in cuda}
    generated = {file for target in bazel.targets.values() for file in target.get("outs", [])}
    assert emulated == {file for file in generated if file.startswith("emulated_")}


def test_nothing_is_fused(compiled):
    """Neither in the codecs nor in their oracle: their bits would depend on the instruction set."""
    for name, flags in compiled.items():
        if name.startswith("core/") or "oracle" in name:
            assert "-ffp-contract=off" in flags, name
    text = (PACKAGE / "CMakeLists.txt").read_text()
    assert "-ftz=true -fmad=false -prec-div=true -prec-sqrt=true" in text


def test_a_library_without_tensorflow_is_refused(tmp_path):
    result = cmake("-S", ROOT, "-B", tmp_path, "-DTFPAR_CUDA=0")
    assert result.returncode != 0
    assert "TFPAR_TENSORFLOW_VERSION is not set" in result.stderr


@pytest.fixture
def nvcc(tmp_path) -> pathlib.Path:
    """The program that a CUDA toolkit of 2020 has, as far as the build asks it."""
    (tmp_path / "libcudart_static.a").touch()
    program = tmp_path / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\ncase "$1" in\n--version) echo "release 11.2, V11.2.1";;\n'
        '--list-gpu-arch) printf "compute_75\\ncompute_80\\ncompute_86\\n";;\n'
        f'--dryrun) echo \'#$ LIBRARIES=  "-L{tmp_path}/stubs" "-L{tmp_path}"\' >&2;;\nesac\n'
    )
    program.chmod(0o755)
    return program


def find_nvcc(tmp_path: pathlib.Path, *options: str, **environ: str) -> tuple[str, str]:
    """What cmake/nvcc.cmake finds: the architectures, and everything that it prints."""
    script = tmp_path / "find.cmake"
    script.write_text(f'include({ROOT}/cmake/nvcc.cmake)\nmessage(STATUS "for=${{CMAKE_CUDA_ARCHITECTURES}}")\n')
    lacking = {"CUDA_HOME": "", "CUDA_PATH": "", "NVCC": ""}
    result = cmake(*options, "-P", script, **{**lacking, **environ})
    printed = " ".join((result.stdout + result.stderr).split())
    return "".join(re.findall("for=(.*)", printed)), printed


def test_gpu_kernels_are_left_out_with_a_line_that_says_why(tmp_path, nvcc):
    found, printed = find_nvcc(tmp_path, "-DTFPAR_CUDA=0", CUDA_HOME=str(tmp_path))
    assert (found, "tfpar_ops: no GPU kernels: TFPAR_CUDA=0" in printed) == ("", True)
    nvcc.unlink()
    nowhere = ["-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", "-DCMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH=OFF"]
    if not pathlib.Path("/usr/local/cuda/bin/nvcc").exists():
        found, printed = find_nvcc(tmp_path, *nowhere)
        assert (found, "no GPU kernels: nvcc was not found" in printed) == ("", True)
        _, printed = find_nvcc(tmp_path, *nowhere, "-DTFPAR_CUDA=1")
        assert "TFPAR_CUDA=1, but nvcc was not found" in printed


def find_gloo(tmp_path: pathlib.Path, *options: str, **environ: str) -> str:
    """What cmake/gloo.cmake prints."""
    script = tmp_path / "CMakeLists.txt"
    script.write_text(f"cmake_minimum_required(VERSION 3.28)\nproject(find CXX)\ninclude({ROOT}/cmake/gloo.cmake)\n")
    result = cmake("--fresh", *options, "-S", tmp_path, "-B", tmp_path / "build", **environ)
    return " ".join((result.stdout + result.stderr).split())


def test_a_build_without_gloo_says_why(tmp_path):
    left_out = cmake("-DTFPAR_GLOO=0", "-P", ROOT / "cmake" / "gloo.cmake")
    assert "tfpar_ops: no transport of its own: TFPAR_GLOO=0" in left_out.stdout + left_out.stderr
    home = tmp_path / "home"
    for path, text in (
        (
            "include/gloo/config.h",
            "".join(f"#define GLOO_VERSION_{each}\n" for each in ("MAJOR 1", "MINOR 2", "PATCH 0")),
        ),
        ("include/gloo/transport/tcp/context.h", "#error contexts are gone\n"),
        ("lib/libgloo.so", ""),
    ):
        (home / path).parent.mkdir(parents=True)
        (home / path).write_text(text)
    other = f"Gloo 1.2.0 at {home}/include differs from what the transport is written for: "
    for options, before in (((), "tfpar_ops: no transport of its own: "), (("-DTFPAR_GLOO=1",), "TFPAR_GLOO=1, but ")):
        printed = find_gloo(tmp_path, *options, GLOO_HOME=str(home))
        assert re.search(re.escape(before + other) + ".*error: #error contexts are gone", printed)


def test_the_library_is_built_again_when_gloo_comes_or_goes(tmp_path):
    """With the Makefile itself, in an environment whose Python only shows what it is called with."""
    environment, home = tmp_path / "venv", tmp_path / "gloo"
    python, header = environment / "bin" / "python", home / "include" / "gloo" / "config.h"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    for name in (".tfpar-tools", ".tfpar-packages"):
        (environment / name).touch()

    def builds(target: str = f"{environment}/.tfpar-installed", *, dry: bool = False) -> str:
        options = [f"VENV={environment}", f"GLOO_HOME={home}", f"GLOO_HEADERS={header}", "TFPAR_GLOO="]
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "-C", str(ROOT), *(["--dry-run"] if dry else []), *options, target]
        return subprocess.run(command, env=plain, capture_output=True, text=True, timeout=60, check=True).stdout

    assert "build_ext" in builds()
    assert ["build_ext" in builds(target) for target in ("setup", "setup")] == [False, False]
    # It is `make setup` that tries to install it.
    assert ["libgloo-dev" in builds(target, dry=True) for target in ("setup", "lint")] == [True, False]
    header.parent.mkdir(parents=True)
    header.touch()
    os.utime(header, (0, 0))  # a package has the times of its making
    assert ["build_ext" in builds() for _ in range(2)] == [True, False]
    assert "libgloo-dev" not in builds("setup", dry=True)
    header.unlink()
    assert ["build_ext" in builds() for _ in range(2)] == [True, False]


def test_an_nvcc_that_knows_only_some_gpus(tmp_path, nvcc):
    """The last one it knows is also there as PTX, for those to come."""
    found, printed = find_nvcc(tmp_path, CUDA_HOME=str(tmp_path))
    assert found == "75-real;80-real;86"
    assert "GPU kernels: CUDA 11.2, compute capability 7.5, 8.0, 8.6 and later" in printed
    for asked in ("8.0", "80", "8.0, 9.0"):
        assert find_nvcc(tmp_path, f"-DTFPAR_CUDA_ARCHITECTURES={asked}", CUDA_HOME=str(tmp_path))[0] == "80"
    found, printed = find_nvcc(tmp_path, "-DTFPAR_CUDA_ARCHITECTURES=8.0 5.2", CUDA_HOME=str(tmp_path))
    assert re.search(r"names 5\.?2; known are 7\.5, 8\.0, 8\.6, 8\.9, 9\.0 .*leave the variable out", printed)
    (tmp_path / "libcudart_static.a").unlink()
    found, printed = find_nvcc(tmp_path, CUDA_HOME=str(tmp_path))
    assert found == ""
    assert "comes without libcudart_static.a" in printed


def test_the_chunks_of_the_cost_model_are_those_of_the_transport():
    header = (PACKAGE / "transport" / "running_call.h").read_text()
    kibibytes = re.search(r"kChunkBytes = int64_t\{(\d+)\} << 10;", header)
    assert int(kibibytes[1]) << 10 == gloo.CHUNK_BYTES
