"""What setup.py builds: the native library, and packages bound to the TensorFlow that it was built for."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from types import ModuleType

import tfpar
from tests.tfpar_ops.checkout import PACKAGE, ROOT
from tfpar.doctor.checks import TESTED
from tfpar_ops import built_for, library, transport_library

import pytest
import tensorflow as tf
from setuptools.errors import PlatformError


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """setup.py, without its call of `setup`."""
    spec = importlib.util.spec_from_file_location("tfpar_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
    assert re.fullmatch(r"tfpar-[\w.]+-py3-none-\w+\.whl", wheel.name)
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
    # TensorBoard of TensorFlow 2.20 needs pkg_resources.
    bound = ["tensorflow==2.20.1", "tensorflow-datasets>=4", "setuptools<82"]
    assert build.bound_to_tensorflow("0.1.0", general) == ("0.1.0", bound)
    monkeypatch.setenv("TFPAR_LOCAL_VERSION", "1")
    assert build.bound_to_tensorflow("0.1.0", general) == ("0.1.0+tf2.20", bound)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.19.1")
    # Later ones end `import tensorflow_datasets` with the protobuf that TensorFlow 2.19 allows.
    assert {"tensorflow-metadata<1.18", "setuptools<82"} <= {*build.bound_to_tensorflow("0.1.0", general)[1]}
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.21.0")
    assert build.bound_to_tensorflow("0.1.0", general)[1] == ["tensorflow==2.21.0", "tensorflow-datasets>=4"]


def test_the_version_is_stated_alike(build):
    """The wheels of the documentation are those of this version, and its changes have a heading of their own."""
    assert tfpar.__version__ == build.VERSION
    assert f'    version = "{tfpar.__version__}",' in (ROOT / "MODULE.bazel").read_text()
    assert f"dist/tfpar-{tfpar.__version__}+tf" in (ROOT / "docs" / "install.md").read_text()
    newest, *released = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == ("Unreleased" if "dev" in tfpar.__version__ else tfpar.__version__)
    assert tfpar.__version__.partition(".dev")[0] not in released


def test_wheels_are_made_for_every_tensorflow_that_is_allowed(build):
    """As `make wheels` names them, oldest first; the doctor knows the same."""
    (versions,) = re.findall(r"^WHEELS_FOR \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    minors = [version.rpartition(".")[0] for version in versions.split()]
    assert f'WHEELS_FOR="{versions.split()[0]} {versions.split()[-1]}"' in (ROOT / ".ci" / "wheels").read_text()
    assert tuple(minors) == TESTED["tensorflow"]
    last = minors[-1].split(".")
    assert f"tensorflow>={minors[0]},<{last[0]}.{int(last[1]) + 1}" in build.INSTALL


def test_without_a_compiler_the_message_says_what_to_install(build, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PlatformError, match=r"no 'no-such-compiler' here.*apt-get install.*TFPAR_OPS_BUILD=0"):
        build.tool(os.environ["CXX"])
    with pytest.raises(PlatformError, match=r"no 'no-such-tool' here.*pip install cmake"):
        build.tool("no-such-tool", "cmake")
