"""``aenv upload`` and ``aenv download``."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from aenv.cli.options import SANDBOX_ID, with_client

if TYPE_CHECKING:
    from aenv.client import Client

_CHUNK = 256 << 10

user_option = click.option("-u", "--user", help="User the file belongs to.  [default: the template's]")


@click.command()
@click.argument("sandbox_id", metavar="ID", type=SANDBOX_ID)
@click.argument("local", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=str))
@click.argument("remote", required=False)
@user_option
def upload(sandbox_id: str, local: str, remote: str | None, user: str | None) -> None:
    """Copy the file LOCAL ("-": standard input) into a sandbox, to REMOTE.

    A relative REMOTE begins at the home directory of the user; one that ends with "/" keeps the file's name, as does
    none at all.
    """
    name = Path(local).name
    if local == "-" and (not remote or remote.endswith("/")):
        raise click.UsageError("standard input has no name: give one in the sandbox")
    target = name if not remote else remote + name if remote.endswith("/") else remote

    with sys.stdin.buffer if local == "-" else Path(local).open("rb") as source:
        click.echo(with_client(lambda client: _send(client, sandbox_id, target, user, source)))


@click.command()
@click.argument("sandbox_id", metavar="ID", type=SANDBOX_ID)
@click.argument("remote")
@click.argument("local", required=False, type=click.Path(allow_dash=True, path_type=str))
@click.option("-f", "--force", is_flag=True, help="Replace a file that exists.")
@user_option
def download(sandbox_id: str, remote: str, local: str | None, force: bool, user: str | None) -> None:
    """Copy the file REMOTE out of a sandbox, to LOCAL ("-": standard output).

    Without LOCAL, or if that is a directory, the file keeps its name. An existing file is replaced only with --force,
    and only when the copy is complete.
    """
    if local == "-":
        with_client(lambda client: _receive(client, sandbox_id, remote, user, sys.stdout.buffer))
        return
    target = Path(local or ".")
    if target.is_dir():
        # The name is the guest's word only if the user typed it.
        target /= Path(remote).name
    from aenv.errors import Conflict, OperationFailed

    if target.exists() and not force:
        raise Conflict(f"{target} exists", remedy="--force replaces it")
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with fresh.open("xb") as stream:
            with_client(lambda client: _receive(client, sandbox_id, remote, user, stream))
        if force:
            fresh.replace(target)
        else:
            os.link(fresh, target)
    except FileExistsError as error:
        raise Conflict(f"{target} exists", remedy="--force replaces it") from error
    except OSError as error:
        raise OperationFailed(f"cannot write {target}: {error.strerror}") from error
    finally:
        fresh.unlink(missing_ok=True)
    click.echo(str(target))


async def _send(client: Client, sandbox_id: str, remote: str, user: str | None, source: BinaryIO) -> str:
    sandbox = await client.attach(sandbox_id)
    return (await sandbox.files.write(remote, _blocks(source), user=user)).path


async def _blocks(source: BinaryIO) -> AsyncIterator[bytes]:
    while block := source.read(_CHUNK):
        yield block


async def _receive(client: Client, sandbox_id: str, remote: str, user: str | None, stream: BinaryIO) -> None:
    sandbox = await client.attach(sandbox_id)
    async for chunk in sandbox.files.stream(remote, user=user):
        stream.write(chunk)
