"""The command ``aenv``.

A command's module is imported when that command is wanted and not before, so ``aenv --help`` and shell completion
stay fast: ``COMMANDS`` holds all that the overview shows.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from aenv import __version__
from aenv.errors import AenvError

COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": ("aenv.cli.commands.serve", "serve", "Run the server of this node."),
    "setup": ("aenv.cli.commands.setup", "setup", "Build the guest kernel and the base template."),
    "doctor": ("aenv.cli.commands.doctor", "doctor", "Check this machine, and say how to repair it."),
    "auth": ("aenv.cli.commands.auth", "auth", "Choose a server, store and create API keys."),
    "start": ("aenv.cli.commands.start", "start", "Start a sandbox, and a shell in it."),
    "connect": ("aenv.cli.commands.connect", "connect", "Open a shell in a running sandbox."),
    "exec": ("aenv.cli.commands.exec", "execute", "Run a command in a sandbox."),
    "list": ("aenv.cli.commands.sandboxes", "list_sandboxes", "List sandboxes."),
    "info": ("aenv.cli.commands.sandboxes", "info", "Show one sandbox."),
    "timeout": ("aenv.cli.commands.sandboxes", "timeout", "Let a sandbox end sooner or later."),
    "logs": ("aenv.cli.commands.logs", "logs", "Show the console of a sandbox."),
    "delete": ("aenv.cli.commands.sandboxes", "delete", "Delete sandboxes."),
    "upload": ("aenv.cli.commands.files", "upload", "Copy a file into a sandbox."),
    "download": ("aenv.cli.commands.files", "download", "Copy a file out of a sandbox."),
    "template": ("aenv.cli.commands.template", "template", "List, import and delete templates."),
    "completion": ("aenv.cli.commands.completion", "completion", "Print the completion script of a shell."),
}
"""Name → module, object in it, one line of help."""

ALIASES = {"ls": "list", "rm": "delete", "cn": "connect"}


class Commands(click.Group):
    """The top-level group: loads a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(ALIASES.get(cmd_name, cmd_name))
        if entry is None:
            return None
        command = getattr(import_module(entry[0]), entry[1])
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            return _nobody_reads()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = {name: [name] for name in COMMANDS}
        for alias, name in ALIASES.items():
            shown[name].append(alias)
        with formatter.section("Commands"):
            formatter.write_dl([(", ".join(names), COMMANDS[name][2]) for name, names in shown.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", message="aenv %(version)s")
def cli() -> None:
    """Agent environments: sandboxes with their own kernel, disk and network.

    Commands talk to the server at AENV_URL with the key AENV_API_KEY, else to the one chosen with `aenv auth login`,
    else to the server on this machine.
    """


def main() -> NoReturn:
    """Run the command line and leave the process with its exit status."""
    sys.exit(run(None))


def run(arguments: list[str] | None) -> int:
    """Run the command line; the exit status: 1 for a failure, 2 for wrong usage, else the command's own.

    Failures are one line on stderr. ``AENV_DEBUG=1`` adds the traceback.
    """
    status = _invoke(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _nobody_reads()
    return status


def _nobody_reads() -> int:
    """The reader of our output went away, which is its right: end as a program does that SIGPIPE ends."""
    # What is still buffered must not fail again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _invoke(arguments: list[str] | None) -> int:
    debug = os.environ.get("AENV_DEBUG", "") not in ("", "0")
    try:
        result: Any = cli.main(args=arguments, prog_name="aenv", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except AenvError as error:
        if debug:
            raise
        return fail(str(error))
    except Exception as error:
        if debug:
            raise
        detail = " ".join(str(error).split())
        return fail(f"internal error: {type(error).__name__}: {detail} (AENV_DEBUG=1 shows where)")
    return result if isinstance(result, int) else 0


def fail(message: str) -> int:
    """Say in one line on stderr what went wrong."""
    click.echo(f"aenv: {message}", err=True)
    return 1
