"""The build of the native library, and what becomes of a library that is missing or made for something else."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import tfpar_ops
from tests import nursery
from tfpar.doctor.checks import TESTED
from tfpar_ops import built_for, codecs, library, transport_library

import pytest
import tensorflow as tf
from setuptools.errors import PlatformError

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
    return _run(subprocess.run, ["-W", "always::RuntimeWarning", "-c", code], folder, environ)


def with_tensorflow(code: str, folder: pathlib.Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """The same for a program that imports TensorFlow, which then need not be imported again."""
    return _run(nursery.run, ["-c", _ANEW + code], folder, environ)


# In front of the first line, to leave the numbers of lines as they are.
_ANEW = (
    "import sys, warnings; warnings.simplefilter('always', RuntimeWarning); "
    "[sys.modules.pop(name) for name in [*sys.modules] if name.startswith('tfpar')]; "
)


def _run(
    start: Any, arguments: list[str], folder: pathlib.Path, environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return start(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
        capture_output=True,
        text=True,
        timeout=300,
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
    reference, native = (with_tensorflow(_ROUND_TRIP, TFPAR_OPS=choice) for choice in ("reference", "native"))
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
    lowest = with_tensorflow(code, TFPAR_OPS="native", TFPAR_OPS_TARGET="baseline")
    assert "CPU baseline" in lowest.stdout
    assert "Warning" not in lowest.stderr
    highest = with_tensorflow(code, TFPAR_OPS="native", TFPAR_OPS_TARGET="x86-64-v4")
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
    shutil.copytree(
        PACKAGE, package, ignore=shutil.ignore_patterns("core", "kernels", "ops", "transport", "__pycache__")
    )
    return package


@pytest.mark.usefixtures("built")
def test_a_library_for_another_tensorflow_is_an_error_of_the_import(copy):
    """It is not even opened: this one is no library at all. TensorFlow need not be imported to know."""
    facts = json.loads((copy / library.FACTS).read_text())
    (copy / library.FACTS).write_text(json.dumps({**facts, "tensorflow": "2.20.0"}))
    (copy / library.FILE).write_bytes(b"not a library")
    result = python("import sys\ntry: import tfpar_ops\nfinally: print('tensorflow' in sys.modules)", copy.parent)
    assert result.returncode == 1
    assert result.stdout == "False\n"
    minor = ".".join(tf.__version__.split(".")[:2])
    (line,) = (line for line in result.stderr.splitlines() if "LibraryError: " in line)
    assert f"tfpar_ops was built for TensorFlow 2.20.0, and {tf.__version__} is installed." in line
    for way in (f"+tf{minor}", "tensorflow==2.20.0", "`make setup`", "TFPAR_OPS=reference"):
        assert way in line
    after = with_tensorflow("import tensorflow, tfpar_ops", copy.parent)
    assert f"and {tf.__version__} is installed." in after.stderr
    command = python("import sys; from tfpar.commands import cli; sys.exit(cli.main(['train', 'image']))", copy.parent)
    assert command.returncode == 2
    assert command.stderr.startswith("error: tfpar_ops was built for TensorFlow 2.20.0")

    reference = with_tensorflow(_ROUND_TRIP, copy.parent, TFPAR_OPS="reference")
    assert reference.returncode == 0, reference.stderr
    with pytest.raises(library.LibraryError, match=r"built for TensorFlow 2\.20\.0, and this is"):
        library.load(copy)


@pytest.mark.usefixtures("built")
def test_a_library_that_does_not_fit_is_replaced_by_the_reference(copy):
    """One warning, then the reference does the work."""
    facts = json.loads((copy / library.FACTS).read_text())
    (copy / library.FACTS).write_text(json.dumps({**facts, "cxx11_abi": 0}))
    (copy / library.FILE).write_bytes(b"not a library")
    reason = "the native library was built for the C++ ABI 0, and this is 1."
    result = with_tensorflow(_ROUND_TRIP, copy.parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == f"reference operations: {reason}"
    assert result.stderr.count("RuntimeWarning") == 1
    assert f"tfpar_ops: {reason} `make setup`" in result.stderr
    assert "<string>:6: RuntimeWarning" in result.stderr  # it points at the caller

    insisting = with_tensorflow(_ROUND_TRIP, copy.parent, TFPAR_OPS="native")
    assert insisting.returncode == 1
    assert f"LibraryError: {reason}" in insisting.stderr


def test_versions_are_compared_as_both_sides_write_them(tmp_path, monkeypatch):
    (tmp_path / built_for.FILE).touch()
    monkeypatch.delenv("TFPAR_OPS", raising=False)
    for built, here, fits in (
        ("2.21.0-rc1", "2.21.0rc1", True),
        ("2.20.0", "2.20.1", False),
        ("2.20.0", "", True),  # no TensorFlow is found: importing it will say so
    ):
        (tmp_path / built_for.FACTS).write_text(json.dumps({"tensorflow": built}))
        monkeypatch.setattr(built_for, "_installed", lambda here=here: here)
        with contextlib.nullcontext() if fits else pytest.raises(built_for.LibraryError):
            built_for.check_tensorflow(tmp_path)
    (tmp_path / built_for.FILE).unlink()
    built_for.check_tensorflow(tmp_path)


@pytest.mark.usefixtures("built")
def test_a_library_of_older_sources_is_told_at_import(copy):
    shutil.copytree(PACKAGE / "core", copy / "core")
    facts = json.loads((copy / library.FACTS).read_text())
    source, program = copy / "core" / "formats.h", "import tfpar_ops"

    def warning() -> str:
        result = python(program, copy.parent)
        assert result.returncode == 0, result.stderr
        return result.stderr

    (copy / library.FACTS).write_text(json.dumps({**facts, "sources": built_for.sources_digest(copy)}))
    assert warning() == ""
    source.write_text(source.read_text() + "// a new row\n")
    assert warning().startswith("<string>:1: RuntimeWarning: ")
    assert f"{copy / library.FILE} was built from other sources than those beside it" in warning()
    assert "`make setup` builds it again." in warning()
    assert python(program, copy.parent, TFPAR_OPS="reference").stderr == ""
    shutil.move(source, source.with_name("rows.h"))  # a name is part of it
    assert "RuntimeWarning" in warning()
    shutil.rmtree(copy / "core")  # as in a wheel
    assert warning() == ""


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
    functions = {"tfpar_abi_version": library.ABI_VERSION - 1, **dict.fromkeys(library._FUNCTIONS, 0)}

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

    insisting = with_tensorflow("import tfpar_ops; tfpar_ops.library_status()", copy.parent, TFPAR_OPS="native")
    assert insisting.returncode == 1
    assert f"LibraryError: {caught.value} `make setup` (in a checkout)" in insisting.stderr


def test_interface_and_code_have_the_same_numbers():
    (number,) = re.findall(r"#define TFPAR_ABI_VERSION (\d+)", (PACKAGE / "core" / "codec.h").read_text())
    assert int(number) == library.ABI_VERSION
    header = (PACKAGE / "transport" / "transport.h").read_text()
    (number,) = re.findall(r"#define TFPAR_TRANSPORT_ABI_VERSION (\d+)", header)
    assert int(number) == transport_library.ABI_VERSION
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
    assert facts["sources"] == built_for.sources_digest(PACKAGE)
    assert bool(facts.get("gloo")) == (PACKAGE / transport_library.FILE).exists()


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
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        (scripts,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/entry_points.txt"))
    # pip may have built it against another TensorFlow than the one where it is installed.
    assert f"Requires-Dist: tensorflow=={importlib.metadata.version('tensorflow')}\n" in metadata
    assert "tfpar = tfpar.commands.cli:main" in scripts
    assert {name for name in names if name.endswith(".flags")} == {
        "tfpar/config/recipes/quickstart.flags",
        "tfpar/config/recipes/language_model.flags",
    }
    assert {f"tfpar_ops/{library.FILE}", "tfpar_ops/FORMAT.md", "tfpar_ops/py.typed", "tfpar_ops/__init__.py"} <= names
    assert facts["tensorflow"] == tf.__version__
    assert not [name for name in names if name.endswith((".cc", ".cu", ".o"))]


def test_the_build_asks_for_the_tensorflow_that_is_installed(build):
    """pip's isolated builds take the bounds of pyproject.toml; a library for another TensorFlow would not be loaded."""
    (bounds,) = re.findall(r'^requires = .*"(tensorflow[^"]*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert bounds in build.INSTALL


def test_a_package_with_the_library_is_bound_to_its_tensorflow(build, monkeypatch):
    general = ["tensorflow>=2.19,<2.22", "tensorflow-datasets>=4"]
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.20.1")
    monkeypatch.delenv("TFPAR_LOCAL_VERSION", raising=False)
    bound = ["tensorflow==2.20.1", "tensorflow-datasets>=4"]
    assert build.bound_to_tensorflow("0.1.0", general) == ("0.1.0", bound)
    monkeypatch.setenv("TFPAR_LOCAL_VERSION", "1")
    assert build.bound_to_tensorflow("0.1.0", general) == ("0.1.0+tf2.20", bound)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.19.1")
    # Later ones end `import tensorflow_datasets` with the protobuf that TensorFlow 2.19 allows.
    assert "tensorflow-metadata<1.18" in build.bound_to_tensorflow("0.1.0", general)[1]


def test_wheels_are_made_for_every_tensorflow_that_is_allowed(build):
    """As `make wheels` names them, oldest first; the doctor knows the same."""
    (versions,) = re.findall(r"^WHEELS_FOR \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    minors = [version.rpartition(".")[0] for version in versions.split()]
    assert f'WHEELS_FOR="{versions.split()[0]} {versions.split()[-1]}"' in (ROOT / ".ci" / "wheels").read_text()
    assert tuple(minors) == TESTED["tensorflow"]
    last = minors[-1].split(".")
    assert f"tensorflow>={minors[0]},<{last[0]}.{int(last[1]) + 1}" in build.INSTALL


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


def test_without_a_compiler_the_message_says_what_to_install(build, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PlatformError, match=r"no 'no-such-compiler' here.*apt-get install.*TFPAR_OPS_BUILD=0"):
        build.tool(os.environ["CXX"])
    with pytest.raises(PlatformError, match=r"no 'no-such-tool' here.*pip install cmake"):
        build.tool("no-such-tool", "cmake")


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
    script = tmp_path / "find.cmake"
    script.write_text(f"include({ROOT}/cmake/gloo.cmake)\n")
    result = cmake(*options, "-P", script, **environ)
    return " ".join((result.stdout + result.stderr).split())


def test_a_build_without_gloo_says_why(tmp_path):
    assert "tfpar_ops: no transport of its own: TFPAR_GLOO=0" in find_gloo(tmp_path, "-DTFPAR_GLOO=0")
    home = tmp_path / "home"
    for folder, name in (("include/gloo", "config.h"), ("lib", "libgloo.so")):
        (home / folder).mkdir(parents=True)
        (home / folder / name).touch()

    def version(number: str) -> None:
        lines = zip(("MAJOR", "MINOR", "PATCH"), number.split("."), strict=True)
        text = "".join(f"#define GLOO_VERSION_{name} {part}\n" for name, part in lines)
        (home / "include" / "gloo" / "config.h").write_text(text)

    version("0.5.0")
    assert "tfpar_ops: transport: Gloo 0.5.0" in find_gloo(tmp_path, GLOO_HOME=str(home))
    listener = home / "include" / "gloo" / "transport" / "tcp" / "listener.h"
    listener.parent.mkdir(parents=True)
    listener.touch()  # of later releases of the same version
    later = f"no transport of its own: Gloo at {home}/include is of May 2023 or later"
    assert later in find_gloo(tmp_path, GLOO_HOME=str(home))
    version("1.2.0")
    other = f"Gloo 1.2.0 at {home}/include is not 0.5, which the transport is written for"
    assert f"no transport of its own: {other}" in find_gloo(tmp_path, GLOO_HOME=str(home))
    assert f"TFPAR_GLOO=1, but {other}." in find_gloo(tmp_path, "-DTFPAR_GLOO=1", GLOO_HOME=str(home))


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
