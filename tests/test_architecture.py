"""The shape of the code base: who may import whom, how long a file may be, what importing it costs."""

from __future__ import annotations

import ast
import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest
from importlinter import api, configuration
from importlinter.application import use_cases

pytestmark = pytest.mark.without_keras

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODULE_LINES = 400
FUNCTION_LINES = 60
FOLDER_MODULES = 16
SCRIPT_LINES = 150
SHORT_LINE = 65  # characters of a line of text within a paragraph


def modules(*packages: str) -> list[pathlib.Path]:
    found = sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))
    assert found
    return found


def relative(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


# Imports


@pytest.fixture
def lint(monkeypatch, capsys):
    """import-linter in this process on a configuration; returns whether it holds, and what was said."""
    configuration.configure()

    def run(config: pathlib.Path) -> tuple[bool, str]:
        monkeypatch.syspath_prepend(str(ROOT))
        # One call below `importlinter.cli.lint_imports`, which would replace this process' logging configuration.
        holds = use_cases.lint_imports(config_filename=str(config), cache_dir=None, no_logo=True)
        return holds, capsys.readouterr().out

    return run


def contracts() -> list[dict]:
    return api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]


def test_the_import_contracts_hold(lint):
    holds, said = lint(ROOT / "pyproject.toml")
    assert holds, said
    assert said.count("KEPT") == len(contracts()) >= 2


def test_a_broken_contract_would_be_noticed(lint, tmp_path):
    """The same tool on a rule that the code base breaks: training does use models."""
    config = tmp_path / "pyproject.toml"
    config.write_text(
        '[tool.importlinter]\nroot_packages = ["tfpar"]\n\n[[tool.importlinter.contracts]]\nname = "upside down"\n'
        'type = "layers"\nlayers = ["tfpar.models", "tfpar.training"]\n'
    )
    holds, said = lint(config)
    assert not holds
    assert "tfpar.training is not allowed to import tfpar.models" in said


def test_every_module_of_tfpar_has_a_layer():
    """A module that no layer names may import, and be imported by, anything. Members of a room may have layers."""
    layers = contracts()[0]["layers"]
    named = {name.strip() for layer in layers for name in layer.split("|")}
    rooms = {f"tfpar.{path.stem}" for path in (ROOT / "tfpar").glob("*.py") if path.stem != "__init__"}
    rooms |= {f"tfpar.{path.parent.name}" for path in (ROOT / "tfpar").glob("*/__init__.py")}
    divided = {name.rpartition(".")[0] for name in named if name.count(".") > 1}
    for room in divided:
        members = (ROOT / room.replace(".", "/")).iterdir()
        assert {name for name in named if name.startswith(f"{room}.")} == {
            f"{room}.{path.stem}" for path in members if not path.stem.startswith("__")
        }
    assert rooms | {"tfpar_ops", "experiments"} == {name for name in named if name.count(".") < 2} | divided


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports() -> dict[str, set[str]]:
    """Which module imports which, those for type checkers and inside functions counted."""
    paths = {module_name(path): path for path in modules("tfpar", "tfpar_ops", "experiments")}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= members & paths.keys() or {node.module}
        graph[name] = (names & paths.keys()) - {name}
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, left = set(), list(graph[start])
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += graph[name]
    return found


def test_no_module_imports_itself_in_a_circle():
    graph = imports()
    # The public names of the package are resolved when they are used: its own imports are for type checkers alone.
    graph["tfpar"] = set()
    assert [name for name in graph if name in reachable(graph, name)] == []
    assert "tfpar.training.step" in reachable(graph, "tfpar.training.trainer")  # the search finds something


# Size and form


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        *[pytest.param(path, MODULE_LINES, id=relative(path)) for path in modules("tfpar", "tfpar_ops")],
        *[pytest.param(path, SCRIPT_LINES, id=relative(path)) for path in sorted((ROOT / "experiments").glob("*.py"))],
    ],
)
def test_no_module_is_longer_than_one_room(path, limit):
    assert len(path.read_text().splitlines()) <= limit


@pytest.mark.parametrize("path", [pytest.param(path, id=relative(path)) for path in modules("tfpar", "tfpar_ops")])
def test_no_function_is_longer_than_a_screen(path):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions)
    }
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}


def test_no_folder_holds_two_rooms():
    folders = {path.parent for path in modules("tfpar", "tfpar_ops")}
    sizes = {
        relative(folder): len([path for path in folder.glob("*.py") if path.stem != "__init__"]) for folder in folders
    }
    crowded = {folder: size for folder, size in sizes.items() if size > FOLDER_MODULES}
    assert crowded == {}, f"more than {FOLDER_MODULES} modules: move helpers of one subject into a subfolder"


def test_the_root_of_the_package_holds_what_its_name_says():
    assert {path.name for path in (ROOT / "tfpar").glob("*.py")} == {
        "__init__.py",
        "__main__.py",
        "plan.py",
        "precision.py",
    }


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=relative(path)) for path in modules("tfpar", "tfpar_ops", "experiments")]
)
def test_public_functions_and_classes_are_documented(path):
    tree = ast.parse(path.read_text())
    body = [node for node in tree.body if not isinstance(node, ast.Expr)]
    if not body:
        return  # a package's empty __init__.py
    missing = [] if ast.get_docstring(tree) else ["the module"]
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, definitions) and not node.name.startswith("_") and not ast.get_docstring(node):
            missing.append(node.name)
    missing = [name for name in missing if name != "main"]  # a script's main is described by the script
    assert not missing, f"{relative(path)}: no docstring on {', '.join(missing)}"


# The beginning of a paragraph that is not prose: a table, a list, a section such as "Args:", a command.
NOT_PROSE = re.compile(r"\s|[|*-]|\d+\.|[A-Z]\w+:$|(python|sudo|tfpar) ")


def paragraphs(docstring: str) -> list[list[str]]:
    """The lines of each paragraph outside of code blocks."""
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", docstring)
    return [
        found for part in re.split(r"\n\s*\n", text) if (found := [line for line in part.split("\n") if line.strip()])
    ]


def broken_lines(tree: ast.Module) -> list[str]:
    """Lines of docstrings that begin in another column than their paragraph, or end long before the next word must."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for lines in paragraphs(ast.get_docstring(node) or ""):
            if NOT_PROSE.match(lines[0]):
                continue
            for line, following in itertools.pairwise(lines):
                if NOT_PROSE.match(following.lstrip()):
                    break  # a list without an empty line before it
                if following[0] == " " or len(f"{line} {following.split()[0]}") < SHORT_LINE:
                    found.append(f"{line!r}, {following!r}")
    return found


def test_paragraphs_of_docstrings_are_not_broken():
    """A formatter of code wraps no text, and what is wrapped by hand or by a script may break."""
    broken = {relative(path): broken_lines(ast.parse(path.read_text())) for path in modules("tfpar", "tfpar_ops")}
    assert {path: lines for path, lines in broken.items() if lines} == {}
    text = "Sums them,\neven alone, as the result depends on how\n  it is divided.\n\nArgs:\n  x: One.\n    Two.\n"
    assert len(broken_lines(ast.parse(f'"""{text}"""'))) == 2  # the search finds something


def test_every_recipe_is_read_by_a_script():
    """Each flagfile in experiments/recipes parses with the flags of the configuration."""
    from tfpar.config import flags

    from absl import flags as absl_flags

    recipes = sorted((ROOT / "experiments" / "recipes").glob("*.flags"))
    assert recipes
    for recipe in recipes:
        found = absl_flags.FlagValues()
        absl_flags.DEFINE_string("flagfile", "", "", flag_values=found)
        flags.define(flag_values=found)
        found(["program", f"--flagfile={recipe}"])
        config = flags.experiment_config(found)
        assert config.train.steps or config.train.epochs, recipe.name


# What importing costs


def loaded_after(*command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    "code",
    [
        "import tfpar",
        "import tfpar; tfpar.ConfigError, tfpar.ExperimentConfig()",
        "import tfpar.config",
        "import tfpar.config.flags; tfpar.config.flags.define()",
        "import tfpar.launch",
        "import tfpar.cluster; tfpar.cluster.detect({})",
    ],
)
def test_what_needs_no_tensorflow_does_not_import_it(code):
    heavy = "{'tensorflow', 'keras', 'tensorflow_datasets', 'numpy'}"
    result = loaded_after("-c", f"import sys; {code}; print(sorted({heavy} & sys.modules.keys()))")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[]\n"


def test_the_launchers_help_does_not_import_tensorflow():
    """Python's own record of imports, of the command as a person types it."""
    result = loaded_after("-X", "importtime", "-m", "tfpar.launch", "--help")
    assert result.returncode == 0, result.stderr
    assert "--workers" in result.stdout
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")
    }
    assert "tfpar.launch" in imported or "tfpar.launch.supervisor" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("tensorflow", "keras", "tensorflow_datasets")}


def test_public_names_exist_and_are_all_there_are():
    import tfpar

    assert sorted(tfpar.__all__) == tfpar.__all__
    for name in tfpar.__all__:
        assert getattr(tfpar, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        tfpar.Trainr  # noqa: B018
