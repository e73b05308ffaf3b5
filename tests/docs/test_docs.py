"""The documentation against the code: links, examples, commands, flags, paths and public names."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import sys
import tomllib

import tfpar
from tests import nursery
from tests.docs import commands, markdown
from tests.docs.markdown import PAGES, README, ROOT, relative

import pytest

pytestmark = pytest.mark.without_keras

README_LINES = 200
BLOCKS = [block for page in PAGES for block in markdown.blocks(page)]
RUNNABLE = [block for block in BLOCKS if block.runnable]
SHELL = ("sh", "bash")
# Folders of the repository; a code span that starts with one of them is a path.
FOLDERS = ("tfpar", "tfpar_ops", "experiments", "tests", "docs", "deploy")
# Phrases that a reader has to decode, and what to write instead.
PHRASES = {
    "anew": "again",
    "for ever": "forever",
    "of before": "previous",
    "kept back": "residual",
    "goes on": "continues",
    "lest": "so that ... not",
    "an update": "a step",
    "updates per": "steps per",
    "is told": "receives",
}

each_page = pytest.mark.parametrize("page", [pytest.param(page, id=relative(page)) for page in PAGES])


def block_id(block: markdown.Block) -> str:
    return f"{relative(block.page)}:{block.line}"


# Links


@each_page
def test_links_lead_somewhere(page):
    broken = []
    for target in markdown.links(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(f"{target}: {path} does not exist")
        elif anchor and anchor not in markdown.anchors(file):
            broken.append(f"{target}: {relative(file)} has no heading for #{anchor}")
    assert not broken


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = set(re.findall(r"[\w/]+\.md", navigation))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= README_LINES


# Examples


@pytest.mark.parametrize("block", [pytest.param(b, id=block_id(b)) for b in BLOCKS if b.language == "python"])
def test_python_blocks_compile(block):
    compile(block.text, block_id(block), "exec")


@pytest.mark.parametrize("block", [pytest.param(b, id=block_id(b)) for b in BLOCKS if b.language == "python"])
def test_python_blocks_use_public_names(block):
    """Names of `tfpar` and of its packages, as far as a block reads them as attributes."""
    unknown = []
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("tfpar", "tfpar.inputs", "tfpar.models"):
            module = tfpar if ast.unparse(node.value) == "tfpar" else getattr(tfpar, ast.unparse(node.value)[6:])
            if node.attr not in module.__all__:
                unknown.append(ast.unparse(node))
    assert not unknown


@pytest.mark.slow
@pytest.mark.parametrize("block", [pytest.param(block, id=block_id(block)) for block in RUNNABLE])
def test_runnable_blocks_run(block, tmp_path):
    environ = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    path = tmp_path / "example.py"
    path.write_text(block.text)
    result = nursery.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_some_blocks_are_runnable():
    assert len(RUNNABLE) >= 2


# Commands, flags, paths, names


@pytest.mark.parametrize("block", [pytest.param(b, id=block_id(b)) for b in BLOCKS if b.language in SHELL])
def test_commands_exist(block):
    assert [problem for command in commands.commands_of(block) for problem in commands.check(command)] == []


@each_page
def test_commands_in_the_text_exist(page):
    spans = [
        span
        for span in markdown.spans(page)
        if re.match(r"(\S*python -m |make [a-z]|experiments/\S+\.py |tfpar [a-z]+ )", span)
    ]
    problems = [problem for span in spans for command in commands.parse(span) for problem in commands.check(command)]
    assert not problems


@each_page
def test_flags_exist(page):
    flags = {match[1] for span in markdown.spans(page) if (match := re.match(r"--(?:\[no\])?([a-z_]\w*)", span))}
    assert flags - commands.all_flags() == set()


def test_a_wrong_command_would_be_noticed():
    def problems(line: str) -> list[str]:
        return [problem for command in commands.parse(line) for problem in commands.check(command)]

    assert problems("python experiments/gone.py --steps=1") == ["experiments/gone.py does not exist"]
    launch = "python -m tfpar.launch --wokers=2 -- experiments/language_model.py --stepps=1"
    assert problems(launch) == [
        "tfpar/launch/__main__.py has no flag --wokers",
        "experiments/language_model.py has no flag --stepps",
    ]
    assert problems("A=1 make trian  # comment") == ["Makefile has no target trian"]
    assert problems("sudo .venv/bin/python experiments/benchmarks/exchange.py --hots=2") == [
        "experiments/benchmarks/exchange.py has no flag --hots"
    ]
    assert problems("python -m pytest tests/gone") == ["tests/gone does not exist"]
    assert problems("python experiments/image_classification.py --noshuffle") == []
    assert problems("tfpar train image --flagfile=quickstart.flags --noshuffle") == []
    assert problems("tfpar launch --workers=2 -- tfpar evaluate --model_file=a --modle=b") == [
        "tfpar/commands/evaluate.py has no flag --modle"
    ]
    assert problems("tfpar trian image") == ["tfpar/commands/trian.py does not exist"]


@each_page
def test_paths_exist(page):
    """Capitals stand for a name that the reader chooses, as in `tfpar/models/NAME.py`."""
    starts = tuple(f"{folder}/" for folder in FOLDERS)
    paths = [span for span in markdown.spans(page) if span.startswith(starts) and " " not in span]
    paths = [path.partition("::")[0] for path in paths if not re.search(r"[A-Z]{4}", pathlib.PurePosixPath(path).stem)]
    missing = [path for path in paths if not any(ROOT.glob(path.rstrip("/")))]
    assert not missing


def test_the_pages_of_architecture_name_every_room():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (ROOT / "tfpar").glob("*/__init__.py")]
    assert [room for room in rooms if f"`tfpar/{room}/`" not in text] == []


def test_the_picture_of_the_rooms_shows_the_contract():
    """Row by row: the layers that import-linter checks, from the top down."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = options["tool"]["importlinter"]["contracts"][0]
    layers = [layer.replace("tfpar.", "").split(" | ") for layer in contract["layers"]]
    picture = (ROOT / "docs/images/rooms.svg").read_text(encoding="utf-8")
    rows: dict[str, list[str]] = {}
    for y, name in re.findall(r'y="(\d+)" font-family="monospace"[^>]*>([^<]+)<', picture):
        rows.setdefault(y, []).append(name)
    assert list(rows.values()) == layers


def test_the_changelog_names_what_is_deprecated():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [name for name in tfpar._DEPRECATED if f"`tfpar.{name}`" not in text] == []


@each_page
def test_words(page):
    text = re.sub(r"`[^`\n]+`", "", markdown.prose(page))
    used = [phrase for phrase in PHRASES if re.search(rf"\b{phrase}\b", text, re.IGNORECASE)]
    assert [f"{phrase}: write {PHRASES[phrase]}" for phrase in used] == []
