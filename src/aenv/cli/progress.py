"""Long work that says what it does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from aenv.cli.output import span


@contextmanager
def shown() -> Iterator[Callable[[str], None]]:
    """A function that takes what is being done now. Every step is a line on stderr with the time since the beginning;
    on a terminal, the step that is going on has a sign of life."""
    began = time.monotonic()

    def line(message: str) -> None:
        click.echo(f"{span(time.monotonic() - began):>7}  {message}", err=True)

    if not sys.stderr.isatty():
        yield line
        return

    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(
        SpinnerColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        current: list[str] = []
        task = progress.add_task("", total=None)

        def step(message: str) -> None:
            if current:
                progress.console.print(f"{span(time.monotonic() - began):>7}  {escape(current.pop())}", highlight=False)
            current.append(message)
            progress.reset(task, description=escape(message))

        yield step
        if current:
            progress.console.print(f"{span(time.monotonic() - began):>7}  {escape(current.pop())}", highlight=False)
