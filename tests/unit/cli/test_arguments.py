"""How command lines are understood, without a server."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from aenv.cli.commands.exec import execute, separate
from aenv.cli.main import ALIASES, COMMANDS, cli
from aenv.cli.options import PAIR

WITH_VALUE = frozenset({"-u", "--user", "-w", "--cwd", "-e", "--env"})


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        (["i1", "ls", "-la"], ["i1", "--", "ls", "-la"]),
        (["i1", "--", "ls", "-la"], ["i1", "--", "ls", "-la"]),
        (["-u", "root", "i1", "ls"], ["-u", "root", "i1", "--", "ls"]),
        (["i1", "-u", "root", "ls", "-u"], ["i1", "-u", "root", "--", "ls", "-u"]),
        (["i1", "-uroot", "ls"], ["i1", "-uroot", "--", "ls"]),
        (["i1", "--user=root", "ls"], ["i1", "--user=root", "--", "ls"]),
        (["-t", "i1", "-iu", "root", "top"], ["-t", "i1", "-iu", "root", "--", "top"]),
        (["i1", "-e", "A=1", "-e", "B=2", "env"], ["i1", "-e", "A=1", "-e", "B=2", "--", "env"]),
        (["i1", "sh", "-c", "a -- b"], ["i1", "--", "sh", "-c", "a -- b"]),
        (["i1", "git", "--", "x"], ["i1", "--", "git", "--", "x"]),
        (["i1", "-"], ["i1", "--", "-"]),
        (["i1"], ["i1"]),
        ([], []),
    ],
)
def test_options_end_where_the_command_begins(given: list[str], understood: list[str]) -> None:
    assert separate(given, WITH_VALUE) == understood


@given(st.lists(st.text(min_size=1, max_size=5), max_size=6))
def test_no_argument_of_the_command_is_touched(command: list[str]) -> None:
    assert separate(["-t", "i1", "--", *command], WITH_VALUE) == ["-t", "i1", "--", *command]


def test_the_command_reaches_us_as_it_was_typed() -> None:
    words = ["-n", "two words", "it's", '"', "$HOME", "*", "", "-h", "--help"]
    context = execute.make_context("exec", ["i1", "-u", "root", "printf", *words])
    assert context.params["command"] == ("printf", *words)
    assert context.params["user"] == "root"


@pytest.mark.parametrize(
    ("text", "pair"), [("A=1", ("A", "1")), ("A=", ("A", "")), ("A=b=c", ("A", "b=c")), ("a b= c ", ("a b", " c "))]
)
def test_pairs(text: str, pair: tuple[str, str]) -> None:
    assert PAIR.convert(text, None, None) == pair


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["start", "--timeout", "0"],
        ["start", "-e", "A"],
        ["start", "-e", "=1"],
        ["start", "-d", "--keep"],
        ["exec"],
        ["exec", "i1"],
        ["exec", "UPPER", "ls"],
        ["exec", "i1", "-n", "-i", "ls"],
        ["exec", "i1", "-t", "ls"],
        ["timeout", "i1", "-1"],
        ["delete"],
        ["delete", "i1", "--all"],
        ["list", "--state", "creating"],
        ["upload", "i1", "/nonexistent"],
        ["upload", "i1", "-"],
        ["template", "import", "x", "/nonexistent"],
    ],
)
def test_wrong_usage_is_status_2_and_asks_no_server(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2, result.output
    assert "Usage:" in result.output


@pytest.mark.parametrize("name", [*COMMANDS, *ALIASES])
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"Usage: cli {name} " in result.output
    assert len(result.output.split("\n\n")) >= 3


def test_the_overview_names_every_command_and_alias() -> None:
    output = CliRunner().invoke(cli, ["--help"]).output
    for name in COMMANDS:
        assert f"\n  {name}" in output
    for alias, name in ALIASES.items():
        assert f"\n  {name}, {alias} " in output


def test_the_overview_says_what_the_commands_say() -> None:
    """The overview does not import commands, so its lines are written twice."""
    for name, (_, _, line) in COMMANDS.items():
        command = cli.get_command(cli.make_context("aenv", ["list"]), name)
        assert command is not None
        assert command.help
        assert line.endswith(".")
        assert len(line) < 60
