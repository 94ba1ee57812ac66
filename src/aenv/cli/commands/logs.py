"""``aenv logs``."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import click

from aenv.cli.options import SANDBOX_ID, with_client

if TYPE_CHECKING:
    from aenv.client import Client

_LINES = 10_000
_INTERVAL = 1.0


@click.command()
@click.argument("sandbox_id", metavar="ID", type=SANDBOX_ID)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until the sandbox ends.")
@click.option("-n", "--lines", type=click.IntRange(1, _LINES), default=1000, show_default=True, help="Last lines only.")
def logs(sandbox_id: str, follow: bool, lines: int) -> None:
    """Show what the kernel and init of a sandbox wrote to the console.

    On a terminal, control characters in it are made harmless; otherwise it is passed on as it is.
    """
    with_client(lambda client: _show(client, sandbox_id, follow, lines))


async def _show(client: Client, sandbox_id: str, follow: bool, limit: int) -> None:
    from aenv.client.refusals import printable
    from aenv.errors import NotFound

    harmless = printable if sys.stdout.isatty() else str
    page = [entry.line for entry in await client.logs(sandbox_id, limit=_LINES)]
    tail = Tail(page[:-limit])
    while follow:
        for line in tail.fresh(page):
            click.echo(harmless(line), color=True)
        await asyncio.sleep(_INTERVAL)
        try:
            page = [entry.line for entry in await client.logs(sandbox_id, limit=_LINES)]
        except NotFound:
            page = []
            break
    for line in tail.rest(page):
        click.echo(harmless(line), color=True)


class Tail:
    """Tells which lines are new in a sequence of pages, each of them the last lines of a console at its time.

    Lines carry no times of their own, so a page is matched with the one before. The last line may be unfinished: it
    is held back until it stayed the same for a page or another follows.
    """

    def __init__(self, skipped: list[str]) -> None:
        self._shown = skipped
        self._held: str | None = None

    def fresh(self, page: list[str]) -> list[str]:
        """Lines to show now."""
        lines = page[_known(self._shown, page) :]
        self._held, held = (lines[-1] if lines else None), self._held
        if lines and (len(lines) > 1 or lines[0] != held):
            lines.pop()
        else:
            self._held = None
        self._shown = (self._shown + lines)[-_LINES:]
        return lines

    def rest(self, page: list[str]) -> list[str]:
        """Lines to show at the end; an empty ``page`` means that there is none to compare with any more."""
        if page:
            return page[_known(self._shown, page) :]
        return [] if self._held is None else [self._held]


def _known(shown: list[str], page: list[str]) -> int:
    """How many lines of ``page`` were shown. The first one may be the rest of a line that was cut."""
    whole = _overlap(shown, page)
    if whole or not page:
        return whole
    cut = _overlap(shown, page[1:])
    return cut + 1 if cut else 0


def _overlap(shown: list[str], page: list[str]) -> int:
    """Length of the longest end of ``shown`` that ``page`` begins with."""
    for length in range(min(len(shown), len(page)), 0, -1):
        if shown[-length] == page[0] and shown[-length:] == page[:length]:
            return length
    return 0
