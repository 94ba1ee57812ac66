"""``aenv connect``."""

from __future__ import annotations

import click

from aenv.cli.options import SANDBOX_ID, env_option, with_client


@click.command()
@click.argument("sandbox_id", metavar="ID", type=SANDBOX_ID)
@click.option("-u", "--user", help="User to log in as.  [default: the template's]")
@click.option("-w", "--cwd", help="Directory to start in.  [default: the template's]")
@env_option
def connect(sandbox_id: str, user: str | None, cwd: str | None, env: tuple[tuple[str, str], ...]) -> int:
    """Open a shell in a sandbox, and exit with its exit status. A paused sandbox is resumed.

    The sandbox does not end while the shell is open, and goes on when it is closed. "~." at the start of a line leaves
    a shell that no longer answers.
    """
    from aenv.cli import attach
    from aenv.client import Client

    async def run(client: Client) -> int:
        return await attach.shell(await client.connect(sandbox_id), user=user, cwd=cwd, env=dict(env))

    try:
        return with_client(run)
    except attach.Left as left:
        return left.code
