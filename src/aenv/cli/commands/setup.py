"""``aenv setup``."""

from __future__ import annotations

from pathlib import Path

import click

from aenv.cli.options import config_option, home_option, load_settings


@click.command()
@home_option
@config_option
@click.option("--refresh", is_flag=True, help="Look for a newer guest kernel.")
@click.option("--rebuild", is_flag=True, help="Build the template `base` anew.")
def setup(home: Path | None, config: Path | None, refresh: bool, rebuild: bool) -> None:
    """Build the guest kernel and the template `base` of this node, as far as they are missing.

    The first `aenv serve` does the same; this shows it on its own, and can renew both. Needs root.
    """
    from aenv.cli import progress

    settings = load_settings(home=home, config=config)
    from aenv.node import images

    with progress.shown() as step:
        kernel, template = images.prepare(settings, step, refresh=refresh, rebuild=rebuild)
    click.echo(f"guest kernel {kernel.version}")
    click.echo(f"template base ({template.template_id})")
