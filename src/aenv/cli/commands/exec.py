"""``aenv exec``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from aenv.cli.options import SANDBOX_ID, env_option, with_client


class CommandLast(click.Command):
    """Everything from the second positional argument on belongs to the command that is run, options included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, separate(args, self._with_value()))

    def _with_value(self) -> frozenset[str]:
        return frozenset(
            name
            for parameter in self.params
            if isinstance(parameter, click.Option) and not parameter.is_flag
            for name in parameter.opts
        )


def separate(args: Sequence[str], with_value: frozenset[str]) -> list[str]:
    """``args`` with a ``--`` before the second positional argument, unless there is one already.

    ``with_value`` are the options that take the next argument as their value.
    """
    positional = 0
    index = 0
    while index < len(args):
        arg = args[index]
        if arg == "--":
            break
        if arg.startswith("--"):
            index += 1 if "=" in arg or arg not in with_value else 2
        elif arg.startswith("-") and len(arg) > 1:
            taking = next((place for place, char in enumerate(arg[1:], 1) if f"-{char}" in with_value), None)
            index += 2 if taking == len(arg) - 1 else 1
        else:
            positional += 1
            if positional == 2:
                return [*args[:index], "--", *args[index:]]
            index += 1
    return list(args)


@click.command("exec", cls=CommandLast)
@click.argument("sandbox_id", metavar="ID", type=SANDBOX_ID)
@click.argument("command", metavar="[--] COMMAND [ARG]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-u", "--user", help="User to run as.  [default: the template's]")
@click.option("-w", "--cwd", help="Directory to run in.  [default: the template's]")
@env_option
@click.option("-t", "--tty", "as_tty", is_flag=True, help="Give the command a terminal.")
@click.option("-i", "--interactive", is_flag=True, help="Send standard input even if it is a terminal.")
@click.option("-n", "--no-stdin", is_flag=True, help="Never read standard input.")
def execute(
    sandbox_id: str,
    command: tuple[str, ...],
    user: str | None,
    cwd: str | None,
    env: tuple[tuple[str, str], ...],
    as_tty: bool,
    interactive: bool,
    no_stdin: bool,
) -> int:
    """Run a command in a sandbox, and exit with its exit status (128 + n if signal n killed it).

    Several arguments are passed on exactly as they are, without a shell. A single argument is a command line for the
    shell of the sandbox: aenv exec ID 'ls *.py | wc -l'

    Standard input is sent if it is not a terminal. Ctrl-C ends the command, twice kills it.
    """
    if no_stdin and (as_tty or interactive):
        raise click.UsageError("--no-stdin contradicts --tty and --interactive")
    if as_tty and not sys.stdin.isatty():
        raise click.UsageError("--tty needs a terminal as standard input")
    from aenv.cli import attach
    from aenv.client import Client

    async def run(client: Client) -> int:
        sandbox = await client.attach(sandbox_id)
        line = command[0] if len(command) == 1 else command
        if as_tty:
            return await attach.tty(sandbox, line, user=user, cwd=cwd, env=dict(env))
        stdin = not no_stdin and (interactive or not sys.stdin.isatty())
        return await attach.pipes(sandbox, line, stdin=stdin, user=user, cwd=cwd, env=dict(env))

    try:
        return with_client(run)
    except attach.Left as left:
        return left.code
