"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import click
import msgspec

from aenv.client.refusals import printable


def wants_json(as_json: bool) -> bool:
    return as_json or not sys.stdout.isatty()


def print_json(value: Any) -> None:
    """``value`` with the names it has on the wire."""
    click.echo(msgspec.json.format(msgspec.json.encode(value)))


def without(value: msgspec.Struct, *names: str) -> dict[str, Any]:
    """``value`` as it is on the wire, but for ``names``."""
    wire: dict[str, Any] = msgspec.to_builtins(value)
    return {name: field for name, field in wire.items() if name not in names}


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Cells may be anybody's words, so they are neither markup nor able to move the cursor. In a narrow terminal the
    last column folds; no cell is cut as long as there is room at all."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, column in enumerate(columns, 1):
        table.add_column(column, no_wrap=number < len(columns), overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Name and value, a line each."""
    shown = list(fields)
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        click.echo(f"{name:<{width}}  {printable(value)}")


def pairs(values: dict[str, str] | None) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted((values or {}).items()))


def size(mebibytes: int) -> str:
    return f"{mebibytes / 1024:g} GiB" if mebibytes % 512 == 0 and mebibytes else f"{mebibytes} MiB"


def span(seconds: float) -> str:
    """A duration in its two largest units: ``45s``, ``2m 05s``, ``3h 12m``, ``4d 01h``."""
    total = max(0, int(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m {total % 60:02}s"
    if total < 86400:
        return f"{total // 3600}h {total % 3600 // 60:02}m"
    return f"{total // 86400}d {total % 86400 // 3600:02}h"


def ago(moment: datetime, now: datetime) -> str:
    return span((now - moment).total_seconds()) + " ago"


def until(moment: datetime, now: datetime) -> str:
    left = (moment - now).total_seconds()
    return f"in {span(left)}" if left > 0 else "now"
