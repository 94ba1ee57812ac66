"""``docs/cli.md`` has all commands and options, and none that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from aenv.cli.main import ALIASES, COMMANDS, cli

PAGE = (Path(__file__).parents[3] / "docs/cli.md").read_text()
EXAMPLES = [
    line.partition("#")[0].strip()
    for block in re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S)
    for line in block.splitlines()
]


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = dict(commands(cli))


@pytest.mark.parametrize("path", ALL)
def test_every_command_has_an_example(path: tuple[str, ...]) -> None:
    spellings = [" ".join(path), *(alias for alias, name in ALIASES.items() if (name,) == path)]
    assert any(f"aenv {spelling}" in PAGE for spelling in spellings)


@pytest.mark.parametrize("path", ALL)
def test_every_option_is_explained(path: tuple[str, ...]) -> None:
    for parameter in ALL[path].params:
        if isinstance(parameter, click.Option):
            assert any(option in PAGE for option in parameter.opts), parameter.opts


@pytest.mark.parametrize("example", [line for line in EXAMPLES if "aenv " in line])
def test_every_example_is_one(example: str) -> None:
    """Its command and options exist."""
    words = example.partition("aenv ")[2].split("|")[0].replace('"$', "").replace(')"', "").split()
    name = ALIASES.get(words[0], words[0])
    assert name in COMMANDS
    command = cli.get_command(click.Context(cli), name)
    rest = words[1:]
    if isinstance(command, click.Group):
        command = command.get_command(click.Context(command), rest.pop(0))
    assert command is not None
    known = {option for parameter in command.params for option in parameter.opts}
    for word in rest:
        if word == "--":
            break
        if word.startswith("-") and len(word) > 1:
            assert word in known, example
