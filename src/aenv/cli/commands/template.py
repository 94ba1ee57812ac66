"""``aenv template``."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import click

from aenv.cli.options import TEMPLATE, config_option, env_option, home_option, json_option, load_settings, with_client


@click.group()
def template() -> None:
    """List, import and delete templates."""


@template.command("list")
@json_option
def list_templates(as_json: bool) -> None:
    """List templates: a table on a terminal, JSON otherwise."""
    from aenv.cli import output

    templates = with_client(lambda client: client.templates())
    if output.wants_json(as_json):
        output.print_json(templates)
        return
    now = datetime.now(UTC)
    output.print_table(
        ["ID", "NAMES", "CPUS", "MEMORY", "DISK", "CREATED", "STATE"],
        (
            [
                info.template_id,
                ", ".join(info.names or info.aliases),
                str(info.cpus),
                output.size(info.memory),
                output.size(info.disk),
                output.ago(info.created_at, now),
                info.build_status,
            ]
            for info in templates
        ),
    )


@template.command("delete")
@click.argument("names", metavar="NAME...", nargs=-1, required=True, type=TEMPLATE)
def delete_templates(names: tuple[str, ...]) -> int:
    """Delete templates by name or id, and print those that were deleted. One in use stays."""
    from aenv.cli.main import fail
    from aenv.client import Client
    from aenv.errors import BadRequest, Conflict, NotFound

    async def delete(client: Client) -> int:
        code = 0
        for name in dict.fromkeys(names):
            try:
                await client.delete_template(name)
            except (BadRequest, Conflict, NotFound) as error:
                code = fail(str(error))
            else:
                click.echo(name)
        return code

    return with_client(delete)


@template.command("import")
@click.argument("name")
@click.argument("source", metavar="PATH", type=click.Path(exists=True, path_type=Path))
@home_option
@config_option
@click.option("--cpus", type=click.IntRange(1, 256), help="CPUs of its sandboxes.  [default: from the configuration]")
@click.option("--memory", type=click.IntRange(min=64), metavar="MIB", help="Memory.  [default: from the configuration]")
@click.option("--disk", type=click.IntRange(min=16), metavar="MIB", help="Disk.  [default: from the configuration]")
@click.option("--workdir", default="", metavar="DIRECTORY", help="Where commands start.  [default: the user's home]")
@env_option
@click.option("--root", is_flag=True, help="Run commands as root; do not add the account `user`.")
@click.option("--replace", is_flag=True, help="Take the name from a template that has it.")
def import_template(
    name: str,
    source: Path,
    home: Path | None,
    config: Path | None,
    cpus: int | None,
    memory: int | None,
    disk: int | None,
    workdir: str,
    env: tuple[tuple[str, str], ...],
    root: bool,
    replace: bool,
) -> None:
    """Make the template NAME from a root file system: PATH is a directory or a tar archive (plain, gzip, xz, zstd).

    Works on this machine's home, beside a running server or without one. Needs root.
    """
    from aenv.cli import progress

    settings = load_settings(home=home, config=config)
    from aenv.model import MachineShape
    from aenv.templates import imports
    from aenv.vmm.kernel import ensure_kernel
    from aenv.vmm.qemu import QemuDriver

    shape = MachineShape(
        vcpus=cpus or settings.machine.vcpus,
        memory=memory or settings.machine.memory,
        disk=disk or settings.machine.disk,
    )
    with progress.shown() as step:
        driver = asyncio.run(QemuDriver.open(settings.vmm, settings.home))
        kernel = ensure_kernel(settings, driver.version_numbers, step)
        made = imports.import_template(
            settings,
            source,
            name,
            shape,
            kernel,
            step,
            user=not root,
            workdir=workdir,
            env=dict(env),
            replace=replace,
        )
    click.echo(made.template_id)


template.add_command(list_templates, "ls")
template.add_command(delete_templates, "rm")
