"""The command line of `tfpar`: finds the subcommand and passes it the rest of the line.

Imports nothing before the command is known, so that help and errors appear immediately.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence

from tfpar.process.command_line import end_with_reader
from tfpar.process.exit_codes import USAGE_ERROR


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
      summary: A few words for the help.
      module: The module that runs it; empty for a group of subcommands.
      members: The subcommands of a group.
    """

    summary: str
    module: str = ""
    members: Mapping[str, Command] = dataclasses.field(default_factory=dict)


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "train a model",
        members={
            "image": Command("an image classifier", "tfpar.commands.train_image"),
            "language": Command("a byte-level language model", "tfpar.commands.train_language"),
            "federated": Command("on a population of clients, by averaging", "tfpar.commands.train_federated"),
            "incremental": Command(
                "tasks one after the other, without forgetting the earlier ones", "tfpar.commands.train_incremental"
            ),
            "reinforcement": Command("a policy that acts in an environment", "tfpar.commands.train_reinforcement"),
        },
    ),
    "plan": Command("predict the fastest way to divide a model over devices, without training", "tfpar.commands.plan"),
    "launch": Command("start a program on several processes of this machine, as a cluster", "tfpar.launch.cli"),
    "evaluate": Command("evaluate a trained model on a data set", "tfpar.commands.evaluate"),
    "play": Command("play a trained policy in Gymnasium", "tfpar.commands.play"),
    "export": Command("export a trained model as SavedModel or ONNX", "tfpar.commands.export"),
    "doctor": Command("find out whether this machine, and this cluster, is fit to train", "tfpar.doctor.cli"),
}
# Modules whose `main(arguments, program)` returns the exit code. The others end the process, as absl programs do.
_WITH_EXIT_CODE = ("tfpar.launch.cli", "tfpar.doctor.cli")

_HELP = ("-h", "--help", "-help", "help")
_EXAMPLES = """\
examples:
  tfpar train image --flagfile=quickstart.flags --workdir=runs/quickstart
  tfpar launch --workers=2 -- tfpar train image --flagfile=quickstart.flags --workdir=runs/two
  tfpar evaluate --model_file=runs/quickstart/model.keras
  tfpar doctor"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that a command line names.

    Args:
      argv: What follows `tfpar` on the command line; by default that of this process.

    Returns:
      The exit code, unless the subcommand ends the process itself.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"tfpar {importlib.metadata.version('tfpar')}")
        return 0
    words, commands = ["tfpar"], COMMANDS
    while arguments and not arguments[0].startswith("-") and arguments[0] in commands:
        command = commands[arguments[0]]
        words.append(arguments.pop(0))
        if command.module:
            return _run(command.module, " ".join(words), arguments)
        commands = command.members
    if not arguments:
        return _fail(f"{' '.join(words)}: name a command.", words, commands)
    if arguments[0] in _HELP:
        end_with_reader()
        print(help_text(words, commands))
        return 0
    return _fail(_unknown(arguments[0], words, commands), words, commands)


def _run(module: str, program: str, arguments: list[str]) -> int:
    try:
        found = importlib.import_module(module)
    except ImportError as error:  # not imported above: importing what defines it is what fails
        if type(error).__name__ != "LibraryError":
            raise
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if module in _WITH_EXIT_CODE:
        return found.main(arguments, program)
    sys.argv = [program, *arguments]  # absl's logs are named after it
    found.run(sys.argv, program)
    return 0


def help_text(words: Sequence[str], commands: Mapping[str, Command]) -> str:
    """The output of `--help`.

    Args:
      words: The command so far, `["tfpar"]` for the whole.
      commands: The possible subcommands.
    """
    program = " ".join(words)
    width = max(map(len, commands)) + 2
    listed = "\n".join(f"  {name:<{width}}{command.summary}" for name, command in commands.items())
    usage = f"usage: {program} COMMAND [--flag=value ...]"
    return "\n\n".join([usage, listed, f"`{program} COMMAND --help` shows the flags.", _EXAMPLES])


def _unknown(word: str, words: Sequence[str], commands: Mapping[str, Command]) -> str:
    """The error for a word that is not a command."""
    program = " ".join(words)
    if word.startswith("-"):
        return f"{program} {word}: the command comes first."
    inside = [(f"{program} {group} {name}", name) for group, each in commands.items() for name in each.members]
    near = difflib.get_close_matches(word, commands, n=1, cutoff=0.5)
    proposed = [f"{program} {name}" for name in near] or [command for command, name in inside if name == word]
    hint = f" Did you mean `{proposed[0]}`?" if proposed else ""
    return f"{program} has no command {word!r}.{hint}"


def _fail(message: str, words: Sequence[str], commands: Mapping[str, Command]) -> int:
    print(f"error: {message} Commands: {', '.join(commands)}. See {' '.join(words)} --help.", file=sys.stderr)
    return USAGE_ERROR
