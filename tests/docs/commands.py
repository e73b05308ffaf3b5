"""Commands in the documentation: which program, which flags, and what that program accepts. Nothing is run."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import re
import shlex

from tests.docs.markdown import ROOT, Block
from tfpar.commands import cli
from tfpar.config import ExperimentConfig
from tfpar.config import flagfiles as flagfiles_of_tfpar
from tfpar.config.experiment import PROGRAM_SECTIONS

_PYTHON = re.compile(r"(.*/)?python3?$")
_ABSL = {"flagfile", "help", "helpfull", "verbosity"}
_PYTEST = {"n", "q", "x"}


@dataclasses.dataclass(frozen=True)
class Command:
    """One program and its arguments.

    Attributes:
      program: Path of a script or module below the repository, `make`, or another program that is installed elsewhere.
      arguments: What follows it.
    """

    program: str
    arguments: tuple[str, ...]

    @property
    def flags(self) -> set[str]:
        """The names of the flags given, without dashes, `no` and values."""
        names = [word[2:].partition("=")[0] for word in self.arguments if word.startswith("--") and len(word) > 2]
        return {name.replace("[no]", "") for name in names}


def commands_of(block: Block) -> list[Command]:
    """The commands of a shell block; of a launcher, its own and that of its script."""
    text = block.text.replace("\\\n", " ")
    return [command for line in text.splitlines() for command in parse(line)]


def parse(line: str) -> list[Command]:
    """The commands of one line: variables and `sudo` before it, and comments after it, do not count."""
    words = shlex.split(line, comments=True)
    while words and (words[0] == "sudo" or re.match(r"^[A-Z_]+=", words[0])):
        words = words[1:]
    if not words:
        return []
    if _PYTHON.match(words[0]):
        words = words[1:]
        if words[:1] == ["-m"]:
            words = [module_path(words[1]), *words[2:]]
    if words[:1] == ["tfpar"]:
        words = console_command(words)
    if "--" in words:
        split = words.index("--")
        rest = words[split + 1 :]
        rest = [module_path(rest[1]), *rest[2:]] if rest[:1] == ["-m"] else rest
        rest = console_command(rest) if rest[:1] == ["tfpar"] else rest
        return [Command(words[0], tuple(words[1:split])), Command(rest[0], tuple(rest[1:]))]
    return [Command(words[0], tuple(words[1:]))]


def module_path(module: str) -> str:
    """The file that `python -m` runs, below the repository; the module's name if it is not ours."""
    path = pathlib.PurePosixPath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__main__.py"):
        if (ROOT / candidate).exists():
            return str(candidate)
    return module


def console_command(words: list[str]) -> list[str]:
    """The words of a `tfpar` command, with the file of its program in place of its name."""
    commands, count = cli.COMMANDS, 1
    while count < len(words) and words[count] in commands:
        command = commands[words[count]]
        count += 1
        if command.module:
            return [module_path(command.module), *words[count:]]
        commands = command.members
    return [f"tfpar/commands/{'_'.join(words[1 : count + 1])}.py", *words[count + 1 :]]


def is_ours(program: str) -> bool:
    """Whether a program is a file of the repository, or is meant to be one."""
    return program.endswith((".py", ".sbatch")) or program.startswith(("tfpar", "experiments"))


@functools.cache
def experiment_flags() -> frozenset[str]:
    """The flags that every experiment takes."""
    return frozenset({*ExperimentConfig().as_flat_dict(), *_ABSL})


def section_flags(program: str) -> frozenset[str]:
    """The flags of the section that one program has beside these."""
    section = PROGRAM_SECTIONS.get(pathlib.PurePosixPath(program).stem.removeprefix("train_"))
    return frozenset(field.name for field in dataclasses.fields(section)) if section else frozenset()


@functools.cache
def defined_flags(path: str) -> frozenset[str]:
    """The flags that a file defines itself, with absl or argparse."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
            continue
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function.startswith("DEFINE_") or function in ("add", "add_argument"):
            names.add(str(node.args[0].value).lstrip("-"))
    return frozenset(names)


def own_flags_of_command(script: str) -> frozenset[str]:
    """The flags of the command whose script this is; none if it is not the script of one."""
    command = f"tfpar/commands/{pathlib.PurePosixPath(script).name}"
    return defined_flags(command) if (ROOT / command).exists() else frozenset()


def flags_of(program: str) -> frozenset[str]:
    """All flags that a program of the repository takes."""
    folder = pathlib.PurePosixPath(program).parent
    own = defined_flags(program) | _ABSL
    if program.endswith("__main__.py") and (ROOT / folder / "cli.py").exists():
        return own | defined_flags(str(folder / "cli.py"))
    if str(folder) == "experiments/benchmarks":
        shared = sorted((ROOT / folder).glob("*.py"))
        return own.union(*(defined_flags(str(path.relative_to(ROOT))) for path in shared))
    if str(folder) in ("experiments", "tfpar/commands"):
        return own | experiment_flags() | section_flags(program) | own_flags_of_command(program)
    return own | experiment_flags() if program == "tfpar/inputs/write.py" else own


@functools.cache
def all_flags() -> frozenset[str]:
    """The flags of all programs of the repository."""
    files = [path for name in ("experiments", "tfpar") for path in sorted((ROOT / name).rglob("*.py"))]
    sections = map(section_flags, PROGRAM_SECTIONS)
    return experiment_flags().union(_ABSL, *sections, *(defined_flags(str(path.relative_to(ROOT))) for path in files))


@functools.cache
def make_targets(makefile: str = "Makefile") -> frozenset[str]:
    """The targets of a Makefile."""
    return frozenset(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / makefile).read_text(), re.MULTILINE))


def check(command: Command) -> list[str]:
    """What is wrong with a command; empty if nothing is.

    Programs that do not belong to the repository (`kubectl`, `nft`, ...) are not checked.
    """
    program, arguments = command.program, command.arguments
    if program == "make":
        return _check_make(arguments)
    if program == "pytest":
        paths = [word.partition("::")[0] for word in arguments if word.startswith("tests")]
        return [f"{path} does not exist" for path in paths if not (ROOT / path).exists()]
    if program in ("SCRIPT", "script.py") or not is_ours(program):
        return []
    if not (ROOT / program).exists():
        return [f"{program} does not exist"]
    if not program.endswith(".py"):
        return []
    flagfiles = [word.partition("=")[2] for word in arguments if word.startswith("--flagfile=")]
    problems = [
        f"{path} does not exist"
        for path in flagfiles
        if path != "FILE" and path not in flagfiles_of_tfpar.names() and not (ROOT / path).exists()
    ]
    known = flags_of(program)
    return problems + [
        f"{program} has no flag --{flag}"
        for flag in sorted(command.flags)
        if flag not in known and not (flag.startswith("no") and flag[2:] in known)
    ]


def _check_make(arguments: tuple[str, ...]) -> list[str]:
    words = list(arguments)
    makefile = "Makefile"
    if words[:1] == ["-C"]:
        makefile, words = f"{words[1]}/Makefile", words[2:]
    targets = [word for word in words if "=" not in word]
    return [f"{makefile} has no target {word}" for word in targets if word not in make_targets(makefile)]
