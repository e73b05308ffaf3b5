"""Which implementation is in use, and what becomes of a library that is missing or made for something else."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import tfpar_ops
from tests import nursery
from tests.tfpar_ops.checkout import PACKAGE, ROOT
from tfpar_ops import built_for, codecs, library, transport_library

import pytest
import tensorflow as tf


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


# A library that is missing or made for something else


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
