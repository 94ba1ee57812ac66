"""``aenv serve``."""

from __future__ import annotations

from pathlib import Path

import click

from aenv.cli.options import config_option, home_option, load_settings


@click.command()
@home_option
@config_option
@click.option("--listen", metavar="ADDRESS:PORT", help="Where to listen.  [default: 127.0.0.1:8000]")
@click.option("--domain", help="Wildcard domain under which ports of sandboxes are reachable.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="[default: info]")
def serve(
    home: Path | None, config: Path | None, listen: str | None, domain: str | None, log_level: str | None
) -> None:
    """Run the server of this node in the foreground, until SIGINT or SIGTERM.

    Sandboxes go on when it stops, and are taken over when it starts again.
    """
    settings = load_settings(home=home, config=config, listen=listen, domain=domain, log_level=log_level)
    from aenv.api.server import run

    run(settings)
