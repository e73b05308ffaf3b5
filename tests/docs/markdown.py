"""Reads the documentation: pages, headings, links, code blocks and code spans."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
# `flags.md` is generated; tests/config compares it with the options.
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
      page: The page it is on.
      line: Number of its first line of code, from 1.
      language: What stands behind the opening fence.
      text: The code.
      runnable: Whether the line before it is `<!-- runnable -->`.
    """

    page: pathlib.Path
    line: int
    language: str
    text: str
    runnable: bool


def relative(path: pathlib.Path) -> str:
    """The path below the repository, for names of tests and for messages."""
    return str(path.relative_to(ROOT))


def blocks(page: pathlib.Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        runnable = before.rstrip("\n").endswith("<!-- runnable -->")
        yield Block(page, before.count("\n") + 2, match["language"], match["text"], runnable)


def prose(page: pathlib.Path) -> str:
    """The text of a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: pathlib.Path) -> list[str]:
    """The code spans of a page, as in `this`."""
    return _SPAN.findall(prose(page))


def links(page: pathlib.Path) -> list[str]:
    """The targets of the links and pictures of a page."""
    return _LINK.findall(_SPAN.sub("", prose(page)))


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and MkDocs make them of headings in plain words."""
    headings = (heading.lower().replace("`", "") for heading in _HEADING.findall(prose(page)))
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in headings}
