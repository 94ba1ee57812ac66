"""``aenv doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from aenv.cli.options import config_option, home_option, load_settings

if TYPE_CHECKING:
    from aenv.cli import checks


@click.command()
@home_option
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(home: Path | None, config: Path | None, as_json: bool) -> int:
    """Check what this machine needs to run a node, and say how to repair what is wrong.

    Exits with 1 if something is missing that a node cannot do without; warnings do not count. Changes nothing.
    """
    from aenv.cli import checks, output

    settings = load_settings(home=home, config=config)
    if as_json:
        reports = list(checks.run(settings))
        output.print_json([report._asdict() for report in reports])
    else:
        reports = []
        for report in checks.run(settings):
            _print(report)
            reports.append(report)
        counts = {status: sum(report.status == status for report in reports) for status in ("warning", "failed")}
        verdict = "this machine can run a node" if not counts["failed"] else "this machine cannot run a node yet"
        click.echo(f"\n{verdict}: {len(reports)} checks, {counts['warning']} warnings, {counts['failed']} failed")
    return 1 if any(report.status == "failed" for report in reports) else 0


def _print(report: checks.Report) -> None:
    colour = {"ok": "green", "warning": "yellow", "failed": "red"}[report.status]
    click.echo(f"{click.style(f'{report.status:<8}', fg=colour)} {report.name:<16} {report.detail}")
    if report.remedy and report.status != "ok":
        click.echo(f"{'':<25} → {report.remedy}")
