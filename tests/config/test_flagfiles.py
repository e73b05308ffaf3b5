"""Files of flags, and recipes by name."""

from __future__ import annotations

from pathlib import Path

from tfpar.config import ConfigError, flagfiles

import pytest

pytestmark = pytest.mark.without_keras
RECIPE = [
    line
    for line in (flagfiles.FOLDER / "quickstart.flags").read_text().splitlines()
    if line and not line.startswith("#")
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_recipe_is_found_by_its_name():
    for given in (["--flagfile=quickstart.flags"], ["--flagfile", "quickstart.flags"], ["-flagfile=quickstart.flags"]):
        assert flagfiles.resolved(["tfpar", *given, "--steps=1"]) == ["tfpar", *RECIPE, "--steps=1"]
    assert flagfiles.resolved(["tfpar", "--", "--flagfile=gone"]) == ["tfpar", "--", "--flagfile=gone"]


def test_a_file_comes_before_a_recipe_of_the_same_name(folder):
    (folder / "quickstart.flags").write_text("# three\n\n// steps\n  --steps=3  \n")
    assert flagfiles.resolved(["tfpar", "--flagfile=quickstart.flags"]) == ["tfpar", "--steps=3"]


def test_a_file_names_recipes_and_the_files_beside_it(folder):
    (folder / "runs" / "base").mkdir(parents=True)
    (folder / "runs" / "mine.flags").write_text(
        "--flagfile=quickstart.flags\n--flagfile=base/small.flags\n--seed=1\n--flagfile=here.flags\n"
    )
    (folder / "runs" / "base" / "small.flags").write_text("--flagfile=smaller.flags\n--steps=3\n")
    (folder / "runs" / "base" / "smaller.flags").write_text("--model=mlp\n")
    (folder / "here.flags").write_text("--shuffle\n")
    expected = ["tfpar", *RECIPE, "--model=mlp", "--steps=3", "--seed=1", "--shuffle"]
    assert flagfiles.resolved(["tfpar", "--flagfile=runs/mine.flags"]) == expected


def test_a_file_may_be_read_twice(folder):
    (folder / "a").write_text("--flagfile=b\n--flagfile=b\n")
    (folder / "b").write_text("--steps=1\n")
    assert flagfiles.resolved(["tfpar", "--flagfile=a", "--flagfile="]) == ["tfpar", "--steps=1", "--steps=1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("folder/quickstart.flags", "=folder/quickstart.flags: no such file. Did you mean --flagfile=quickstart."),
        ("outer", "=gone in outer: no such file. Name a file with a flag per line, or a recipe that comes with tfpar:"),
        (".", "=.: cannot be read (Is a directory). Name a file with a flag per line, or a recipe"),
        ("image", "=image: cannot be read (not text in UTF-8). Name a file with a flag per line"),
        ("round", "=round in again: the file includes itself (round -> again -> round). Take one of these lines out."),
    ],
)
def test_files_that_cannot_be_used(folder, given, message):
    (folder / "outer").write_text("--flagfile=gone\n")
    (folder / "image").write_bytes(b"\x89PNG\xff")
    (folder / "round").write_text("--flagfile=again\n")
    (folder / "again").write_text("--flagfile=round\n")
    with pytest.raises(ConfigError) as caught:
        flagfiles.resolved(["tfpar", f"--flagfile={given}"])
    assert f"--flagfile{message}" in str(caught.value)
    assert "\n" not in str(caught.value)
