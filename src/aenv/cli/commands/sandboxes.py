"""``aenv list``, ``info``, ``timeout`` and ``delete``."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import click

from aenv.cli.options import PAIR, SANDBOX_ID, json_option, with_client

if TYPE_CHECKING:
    from aenv.client import Client, SandboxInfo

_DELETES_AT_ONCE = 16


@click.command("list")
@click.option("--state", "states", type=click.Choice(["running", "paused"]), multiple=True, help="Only these states.")
@click.option("-m", "--metadata", type=PAIR, multiple=True, metavar="KEY=VALUE", help="Only with this metadata.")
@click.option("--template", help="Only sandboxes of this template.")
@click.option("-q", "--quiet", is_flag=True, help="Print ids only, one a line.")
@json_option
def list_sandboxes(
    states: tuple[Literal["running", "paused"], ...],
    metadata: tuple[tuple[str, str], ...],
    template: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """List sandboxes, newest first: a table on a terminal, JSON otherwise."""
    from aenv.cli import output

    async def found(client: Client) -> list[SandboxInfo]:
        return [info async for info in client.sandboxes(states=states, metadata=dict(metadata), template=template)]

    sandboxes = with_client(found)
    if quiet:
        for info in sandboxes:
            click.echo(info.sandbox_id)
        return
    if output.wants_json(as_json):
        output.print_json(sandboxes)
        return
    now = datetime.now(UTC)
    output.print_table(
        ["ID", "TEMPLATE", "STATE", "STARTED", "ENDS", "CPUS", "MEMORY", "METADATA"],
        (
            [
                info.sandbox_id,
                info.alias or info.template_id,
                info.state,
                output.ago(info.started_at, now),
                output.until(info.end_at, now),
                str(info.cpus),
                output.size(info.memory),
                output.pairs(info.metadata),
            ]
            for info in sandboxes
        ),
    )


@click.command()
@click.argument("sandbox_id", metavar="ID", type=SANDBOX_ID)
@json_option
def info(sandbox_id: str, as_json: bool) -> None:
    """Show one sandbox."""
    from aenv.cli import output

    detail = with_client(lambda client: client.info(sandbox_id))
    if output.wants_json(as_json):
        # The token of the agent is a secret, and output ends up in logs.
        output.print_json(output.without(detail, "envdAccessToken"))
        return
    now = datetime.now(UTC)
    internet = {True: "allowed", False: "cut off", None: "allowed (default)"}[detail.internet]
    template = f"{detail.alias} ({detail.template_id})" if detail.alias else detail.template_id
    output.print_fields(
        [
            ("id", detail.sandbox_id),
            ("template", template),
            ("state", detail.state),
            ("started", f"{detail.started_at.astimezone():%Y-%m-%d %H:%M:%S} ({output.ago(detail.started_at, now)})"),
            ("ends", f"{detail.end_at.astimezone():%Y-%m-%d %H:%M:%S} ({output.until(detail.end_at, now)})"),
            ("machine", f"{detail.cpus} CPU, {output.size(detail.memory)} memory, {output.size(detail.disk)} disk"),
            ("internet", internet),
            ("metadata", output.pairs(detail.metadata) or "-"),
        ]
    )


@click.command()
@click.argument("sandbox_id", metavar="ID", type=SANDBOX_ID)
@click.argument("seconds", type=click.IntRange(min=0))
def timeout(sandbox_id: str, seconds: int) -> None:
    """Let a sandbox end SECONDS from now, sooner or later than it would have. 0 ends it now."""
    with_client(lambda client: client.set_timeout(sandbox_id, seconds))


@click.command()
@click.argument("sandbox_ids", metavar="ID...", type=SANDBOX_ID, nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Delete every sandbox of the server.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before --all.")
def delete(sandbox_ids: tuple[str, ...], everything: bool, yes: bool) -> int:
    """Delete sandboxes, and print the ids of those that were deleted."""
    import sys

    from aenv.cli.main import fail

    if bool(sandbox_ids) == everything:
        raise click.UsageError("give ids, or --all")
    if everything:
        sandbox_ids = with_client(_all_ids)
        if sandbox_ids and not yes and sys.stdin.isatty():
            click.confirm(f"Delete {len(sandbox_ids)} sandboxes?", abort=True)

    failures = with_client(lambda client: _delete(client, sandbox_ids, forgiving=everything))
    for message in failures:
        fail(message)
    return 1 if failures else 0


async def _all_ids(client: Client) -> tuple[str, ...]:
    return tuple([info.sandbox_id async for info in client.sandboxes()])


async def _delete(client: Client, sandbox_ids: tuple[str, ...], *, forgiving: bool) -> list[str]:
    """Delete and print; the failures in words. ``forgiving``: what ended by itself meanwhile is no failure."""
    from aenv.errors import AenvError, NotFound, Unauthorized

    slots = asyncio.Semaphore(_DELETES_AT_ONCE)
    failures: list[str] = []

    async def one(sandbox_id: str) -> None:
        async with slots:
            try:
                await client.delete(sandbox_id)
            except Unauthorized:
                raise
            except NotFound as error:
                if not forgiving:
                    failures.append(str(error))
            except AenvError as error:
                failures.append(f"{sandbox_id}: {error}")
            else:
                click.echo(sandbox_id)

    results = await asyncio.gather(
        *(one(sandbox_id) for sandbox_id in dict.fromkeys(sandbox_ids)), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return failures
