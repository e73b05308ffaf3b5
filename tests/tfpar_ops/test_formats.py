"""The tables of formats, in Python and in C++, and that a new format needs nothing but its five places."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

from tfpar_ops.formats import FORMATS

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CORE = ROOT / "tfpar_ops" / "core"

# Where a new format is added. Kernels are two files, for CPUs and for GPUs; the definition comes with an oracle for the
# tests in Python and one for those in C++. docs/ lists the same files for those who add a format.
PLACES = {
    "the table of Python": ["tfpar_ops/formats.py"],
    "the table of C++": ["tfpar_ops/core/formats.h"],
    "kernels": ["tfpar_ops/core/kernels/e5m2.h", "tfpar_ops/core/cuda/e5m2.cuh"],
    "reference": ["tfpar_ops/reference/e5m2.py"],
    "definition and oracles": ["tfpar_ops/FORMAT.md", "tests/tfpar_ops/oracle.py", "tests/native/oracle.cc"],
}
PATCH = pathlib.Path(__file__).with_name("add_e5m2.patch")

# The new format in all implementations that need no TensorFlow headers to build, against the oracle.
PROGRAM = """
import pathlib, sys
import tfpar_ops
assert pathlib.Path(tfpar_ops.__file__).parents[1] == pathlib.Path.cwd(), tfpar_ops.__file__
from tests.tfpar_ops import core, data, implementations, test_agreement, test_codecs, test_formats, test_properties
from tfpar_ops import Codec
core.get = core.load  # without operations
codec = Codec("e5m2")
test_formats.test_both_tables_say_the_same()
test_formats.test_every_format_is_described_and_has_its_files()
test_codecs.test_length_and_header_of_every_payload(codec)
test_agreement.check_lengths_in_the_native_core(codec, test_agreement.SOME_LENGTHS)
for name in ("reference", "xla"):
    test_agreement.test_every_operation_on_one_layout(name, codec)
reference = implementations.get("reference")
test_agreement.test_many_lengths(reference, codec)
test_properties.test_zeros_stay_zeros(reference, codec)
test_properties.test_error_feedback_delivers_everything_in_the_end(reference, codec)
for bad in data.NOT_FINITE.view("uint32")[:2]:
    test_properties.test_what_is_not_finite_decodes_to_nan_and_leaves_the_residual(reference, codec, bad)
"""


def rows() -> dict[str, list[str]]:
    """Fields of the rows of `TFPAR_FORMATS`, without macro identifier, by name of the format."""
    fields = [re.split(r",\s*", row) for row in re.findall(r"^  X\((.*)\)\s*\\?$", read("formats.h"), re.MULTILINE)]
    return {name.strip('"'): [identifier, *rest] for identifier, name, *rest in fields}


def read(name: str) -> str:
    return (CORE / name).read_text()


def test_both_tables_say_the_same():
    assert list(rows()) == list(FORMATS)
    for name, (identifier, *fields, _kernel) in rows().items():
        entry = FORMATS[name]
        assert identifier == name.upper()
        assert fields == [
            str(entry.number),
            str(entry.code_bits),
            "KEPT" if entry.keeps else "EVERY",
            entry.scale.upper(),
            str(min(entry.blocks)),
            str(max(entry.blocks)),
            "STOCHASTIC" if entry.stochastic else "NEAREST",
        ]


def test_every_format_is_described_and_has_its_files():
    text = (ROOT / "tfpar_ops" / "FORMAT.md").read_text().partition("| number | kind |")[2].partition("\n\n")[0]
    table = re.findall(r"^\| (\d+) \| (\w+)", text, re.MULTILINE)
    assert table == [(str(entry.number), name) for name, entry in FORMATS.items()]
    for entry in FORMATS.values():
        assert entry.number < 128
        assert entry.default_block in entry.blocks
        assert all(block & (block - 1) == 0 for block in entry.blocks)
        assert callable(entry.reference.encode)
        assert callable(entry.reference.decode)
    for name in re.findall(r"^#include TFPAR_FORMAT_FILE\((\w+)\)", read("formats.h"), re.MULTILINE):
        assert (CORE / "kernels" / f"{name}.h").exists()
        assert (CORE / "cuda" / f"{name}.cuh").exists()


def test_no_two_formats_share_a_name_or_number():
    assert len({entry.number for entry in FORMATS.values()}) == len(FORMATS)
    names = [name for entry in FORMATS.values() for name in (entry.name, *entry.other_names)]
    assert len(set(names)) == len(names)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the sources of tfpar_ops and its tests."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.json")
    for folder in ("tfpar_ops", "tests/tfpar_ops", "tests/native"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    (tmp_path / "tests" / "__init__.py").touch()
    return tmp_path


def run(command: list[str], folder: pathlib.Path, **environ: str) -> str:
    """Runs a program; its output.

    Raises:
      AssertionError: With the output, if it fails.
    """
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}"
    return result.stdout


def add_format(tree: pathlib.Path) -> None:
    """Adds the format e5m2 to a copy of the sources."""
    run(["git", "apply", "-C1", str(PATCH)], tree, GIT_CEILING_DIRECTORIES=str(tree.parent))


def test_a_new_format_touches_five_places(tree: pathlib.Path):
    before = contents(tree)
    add_format(tree)
    after = contents(tree)
    touched = {name for name in after if before.get(name) != after[name]}
    assert touched == {name for names in PLACES.values() for name in names}
    assert set(before) <= set(after)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_new_format_works_with_nothing_else_changed(tree: pathlib.Path):
    """Builds the core without TensorFlow, for one instruction set: its tests and those in Python cover the format."""
    add_format(tree)
    core = sorted((tree / "tfpar_ops" / "core").glob("*.cc"))
    native = (tree / "tests" / "native").glob("*.cc")
    tests = [path for path in sorted(native) if path.name != "fuzz_decode.cc"]  # a program of its own
    cuda = sorted((tree / "tfpar_ops" / "core" / "cuda").glob("*.cu"))
    emulation = ("-x", "c++", "-DTFPAR_EMULATION", "-Itests/native/cuda/emulation", "-Wno-unknown-pragmas")
    built = tree / "objects"
    built.mkdir()

    def compile_source(source: pathlib.Path) -> str:
        target = built / f"{source.name}.o"
        flags = [
            "-std=c++17",
            "-fPIC",
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-Wall",
            "-Wextra",
        ]
        flags += ["-O0", *emulation] if source in cuda else ["-O1"]
        run([os.environ.get("CXX", "g++"), *flags, "-c", str(source), "-o", str(target)], tree)
        return str(target)

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_source, [*core, *tests, *cuda]))
    compiler, library, program = os.environ.get("CXX", "g++"), "tfpar_ops/libtfpar_ops.so", str(built / "run")
    run([compiler, "-shared", "-o", library, *objects[: len(core)]], tree)
    run([compiler, "-o", program, *objects[: len(core) + len(tests)]], tree)
    assert " 0 failed checks" in run([program], tree, TFPAR_TEST_STRIDE="97", TFPAR_OPS_TARGET="baseline")
    run([sys.executable, "-c", PROGRAM], tree, PYTHONPATH=str(tree))
