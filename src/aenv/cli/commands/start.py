"""``aenv start``."""

from __future__ import annotations

import sys
from contextlib import suppress

import click

from aenv.cli.options import PAIR, TEMPLATE, env_option, with_client


@click.command()
@click.argument("template", default="base", type=TEMPLATE)
@click.option("-d", "--detach", is_flag=True, help="Print the id of the sandbox and leave it running.")
@click.option("--keep", is_flag=True, help="Do not delete the sandbox when the shell ends.")
@click.option(
    "--timeout", type=click.IntRange(min=1), metavar="SECONDS", help="Life of the sandbox.  [default: the server's]"
)
@env_option
@click.option("-m", "--metadata", type=PAIR, multiple=True, metavar="KEY=VALUE", help="Attach metadata; repeatable.")
@click.option("--no-internet", is_flag=True, help="Cut the sandbox off from everything outside.")
def start(
    template: str,
    detach: bool,
    keep: bool,
    timeout: int | None,
    env: tuple[tuple[str, str], ...],
    metadata: tuple[tuple[str, str], ...],
    no_internet: bool,
) -> int:
    """Start a sandbox from TEMPLATE (base) and open a shell in it; exits with the exit status of the shell.

    The sandbox lives as long as the shell and is deleted with it, unless --keep is given. With -d there is no shell:
    the id is printed, and the sandbox ends when its timeout has passed.
    """
    if detach and keep:
        raise click.UsageError("--detach keeps the sandbox anyway")
    from aenv.cli import attach
    from aenv.client import Client
    from aenv.errors import AenvError

    async def run(client: Client) -> int:
        sandbox = await client.create(
            template,
            timeout=timeout,
            env=dict(env),
            metadata=dict(metadata),
            internet=False if no_internet else None,
        )
        if detach:
            click.echo(sandbox.sandbox_id)
            return 0
        if sys.stdin.isatty():
            click.echo(f"sandbox {sandbox.sandbox_id}, {'kept' if keep else 'deleted'} when this shell ends", err=True)
        try:
            return await attach.shell(sandbox)
        finally:
            if not keep:
                with suppress(AenvError):
                    await sandbox.delete()

    try:
        return with_client(run)
    except attach.Left as left:
        return left.code
