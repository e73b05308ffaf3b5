"""Usage errors and the help of the launcher, which start nothing."""

from __future__ import annotations

import sys

from tests.launch.actors import ACTOR
from tfpar.launch import cli as launch

import pytest

pytestmark = pytest.mark.without_keras


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--workers=N"),
        (["--workers=0", "--", ACTOR], "--workers=0 must be at least 1"),
        (["--workers=two", "--", ACTOR], "--workers=two is not a whole number; give one, as in --workers=2."),
        (["--workers=1", "--grace_period=long", "--", ACTOR], "--grace_period=long is not a number; give one"),
        (["--workers=1", "--ps=-1", "--", ACTOR], "--ps=-1 must be at least 0"),
        (["--workers=1", "--restart_delay=nan", "--", ACTOR], "--restart_delay=nan must be at least 0"),
        (["--workers=1", "--restart_delay=inf", "--", ACTOR], "=inf must be at least 0 and at most 1000000 s"),
        (["--workers=1", "--grace_period=1e300", "--", ACTOR], "--grace_period=1e+300 must be at least 0 and at most"),
        (["--workers=1", "--restart_delay=1", "--", ACTOR], "--restart_delay=1 has no effect with --max_restarts=0"),
        (["--workers=2", "--min_workers=1", "--", ACTOR], "--min_workers=1 has no effect with --max_restarts=0: a"),
        (["--workers=2", "--min_workers=1", "--max_restarts=1", "--", ACTOR], "Give at least --max_restarts=2."),
        (["--worker=1", "--", ACTOR], "unknown argument --worker. Did you mean --workers?"),
        (["--workers=1", ACTOR], f"put -- before the script: python -m tfpar.launch --workers=1 -- {ACTOR}"),
        (["--workers=1", "train.py", "--steps=3"], "python -m tfpar.launch --workers=1 -- train.py --steps=3"),
        (["--workers=1", "--log_dir=/proc/logs", "--", ACTOR], "--log_dir=/proc/logs: /proc cannot be written to"),
        (["--workers=1", "--"], "no script"),
        (["--workers=1", "--", ACTOR.replace("actor", "actr")], "Did you mean"),
        (["--workers=1", "--", "--steps=3"], "the script must come first"),
        (["--workers=1", "--", "python", ACTOR], f"leave python out, as in -- {ACTOR}."),
        (["--workers=1", "--", sys.executable, "-m", "train"], f"leave {sys.executable} out, as in -- -m train."),
        (["--workers=1", "--", "-m"], "name of a module"),
        (["--workers=1", "--", "-m", "no_such_package.train"], "no module named 'no_such_package'"),
    ],
)
def test_usage_errors(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch.main(arguments)
    shown = capsys.readouterr()
    assert caught.value.code == 2
    assert shown.err.startswith("error: ")
    assert expected in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_modules_of_the_working_directory_are_found(tmp_path, monkeypatch) -> None:
    """Workers are started with `python -m`, which looks there; the console script does not."""
    (tmp_path / "package_here").mkdir()
    (tmp_path / "package_here" / "train.py").touch()
    (tmp_path / "module_here.py").touch()
    monkeypatch.chdir(tmp_path)
    for module in ("package_here.train", "module_here", "json.tool"):
        assert launch.parse(["--workers=1", "--", "-m", module]).command == ("-m", module)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch.main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for text in ("--workers", "--max_restarts", "TFPAR_RESTARTS", "examples:"):
        assert text in shown
