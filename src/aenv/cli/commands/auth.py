"""``aenv auth``: which server this user talks to, and with which key."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from aenv.cli.options import home_option, json_option, load_settings


@click.group()
def auth() -> None:
    """Choose a server, store and create API keys."""


@auth.command()
@click.option("--url", help="Address of the server.  [default: the one in use]")
@click.option("--no-verify", is_flag=True, help="Store the key without asking the server.")
def login(url: str | None, no_verify: bool) -> None:
    """Store the address of a server and a key for it, after a check.

    The key is asked for on a terminal, else read from standard input, so that it is in no list of processes.
    """
    from aenv.client import Client, credentials

    address = credentials.resolve(url=url).url
    if sys.stdin.isatty():
        key = str(click.prompt(f"API key for {address}", hide_input=True))
    else:
        key = sys.stdin.readline(1024)
    key = credentials.check_key(key, "standard input")
    if not no_verify:
        _verify(Client(credentials.Credentials(address, "the command line", key, "standard input")))
    if address.startswith("http://") and not credentials.is_local(address):
        click.echo(f"aenv: warning: {address} is not encrypted, others on the network can read the key", err=True)
    file = credentials.write_stored(credentials.Stored(address, key))
    click.echo(f"stored in {file}")
    for name in ("AENV_URL", "E2B_API_URL", "AENV_API_KEY", "E2B_API_KEY"):
        if os.environ.get(name):
            click.echo(f"aenv: warning: {name} is set, and wins over the file", err=True)


@auth.command()
@json_option
def status(as_json: bool) -> int:
    """Say which server and key are in use, from where, and whether the server takes the key."""
    from aenv.cli import output
    from aenv.client import Client, credentials
    from aenv.errors import AenvError

    found = credentials.resolve()
    key = f"…{found.key[-4:]}" if found.key else None
    try:
        _verify(Client(found))
        problem = None
    except AenvError as error:
        problem = str(error)
    if output.wants_json(as_json):
        output.print_json(
            {
                "url": found.url,
                "urlSource": found.url_source,
                "key": key,
                "keySource": found.key_source if key else None,
                "error": problem,
            }
        )
    else:
        output.print_fields(
            [
                ("server", f"{found.url} (from {found.url_source})"),
                ("key", f"{key} (from {found.key_source})" if key else "none"),
                ("state", problem or "accepted"),
            ]
        )
    file = credentials.credentials_file()
    if file.exists() and file.stat().st_mode & 0o077:
        click.echo(f"aenv: warning: others can read {file}: chmod 600 {file}", err=True)
    return 1 if problem else 0


@auth.command()
def logout() -> None:
    """Forget the stored server and key."""
    from aenv.client import credentials

    file = credentials.credentials_file()
    click.echo(f"deleted {file}" if credentials.delete_stored() else f"nothing to delete: there is no {file}")


@auth.command("create-key")
@home_option
@click.option("--name", default="cli", show_default=True, help="What the key is for.")
def create_key(home: Path | None, name: str) -> None:
    """Create an API key for the server on this machine, and print it. Needs no running server.

    It is shown this once; only its hash is stored.
    """
    settings = load_settings(home=home)
    from aenv.node import keys

    click.echo(keys.create_key(settings, name))


def _verify(client: object) -> None:
    """Raises what the server says about the key."""
    import asyncio

    from aenv.client import Client

    assert isinstance(client, Client)

    async def ask() -> None:
        async with client:
            await client.check()

    asyncio.run(ask())
