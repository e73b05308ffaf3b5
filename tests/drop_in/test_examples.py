"""The examples of the drop-in in the documentation."""

from __future__ import annotations

import ast
import re

import tfpar
from tests.drop_in.alone import ROOT
from tfpar import drop_in


def statements_of_the_example() -> list[str]:
    """The imports and the body of `main` of the script, all but `from __future__` and that of its command line."""
    script = ast.parse((ROOT / "experiments/keras_fit.py").read_text()).body
    (main,) = [node for node in script if isinstance(node, ast.FunctionDef)]
    imports = [node for node in script if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [line for line in map(ast.unparse, [*imports, *main.body]) if line != "import argparse"][1:]


def statements_shown(page: str) -> list[str]:
    """The statements of the one Python block of a page that uses the optimizer."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (shown,) = [ast.parse(block).body for block in blocks if "DistributedOptimizer" in block]
    return [ast.unparse(node) for node in shown]


def test_the_documentation_shows_the_example():
    assert statements_shown("docs/keras.md") == statements_of_the_example()


def test_the_readme_shows_lines_of_the_example():
    script = iter(statements_of_the_example())
    assert [line for line in statements_shown("README.md") if line not in script] == []  # `in` consumes: the same order


def test_the_names_are_those_of_the_package():
    for name in drop_in.__all__:
        assert getattr(tfpar, name) is getattr(drop_in, name)
