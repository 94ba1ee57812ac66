"""``aenv template``."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from aenv.cli.options import TEMPLATE, json_option, with_client


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


template.add_command(list_templates, "ls")
template.add_command(delete_templates, "rm")
