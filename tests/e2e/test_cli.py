"""The command line against a real node and its virtual machines."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.node import TestNode


@pytest.fixture
def aenv(node: TestNode, tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path, AENV_URL=node.url, AENV_API_KEY=node.key, AENV_HOME=str(node.home))


@pytest.fixture
def sandbox(aenv: CommandLine) -> Iterator[str]:
    started = aenv("start", "-d", "--timeout", "300", "-e", "GREETING=hello you", "-m", "who=cli test")
    assert started.returncode == 0, started.stderr
    sandbox_id = started.stdout.decode().strip()
    yield sandbox_id
    aenv("rm", sandbox_id)


def test_a_sandbox_from_start_to_end(aenv: CommandLine, sandbox: str) -> None:
    (listed,) = json.loads(aenv("ls", "-m", "who=cli test").stdout)
    assert (listed["sandboxID"], listed["alias"], listed["state"]) == (sandbox, "base", "running")

    result = aenv("exec", sandbox, "--", "sh", "-c", 'echo "$GREETING, $(id -un) in $(pwd)"; echo err >&2; exit 3')
    assert (result.stdout, result.stderr, result.returncode) == (b"hello you, user in /home/user\n", b"err\n", 3)

    content = os.urandom(1_000_000)
    assert aenv("upload", sandbox, "-", "data/file", input=content).stdout == b"/home/user/data/file\n"
    assert aenv("exec", sandbox, "cat data/file").stdout == content
    assert aenv("exec", sandbox, "tee data/copy | wc -c", input=content).stdout == b"1000000\n"
    assert aenv("download", sandbox, "data/copy", "-").stdout == content

    assert "aenv-envd: ready" in aenv("logs", sandbox).stdout.decode()
    assert aenv("timeout", sandbox, "1000").returncode == 0

    with aenv.running("exec", sandbox, "--", "sh", "-c", "echo on; sleep 1000") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"on\n"
        assert aenv("rm", sandbox).stdout.decode().strip() == sandbox
        assert process.wait(60) == 1
        assert re.fullmatch(rb"aenv: the sandbox ended while the command ran: .*\n", process.stderr.read())
    assert b"killed by request" in aenv("exec", sandbox, "true").stderr


def test_a_shell(aenv: CommandLine, sandbox: str) -> None:
    with aenv.terminal("connect", sandbox, cols=91, rows=33) as terminal:
        terminal.expect(b"$ ")
        terminal.type(b"stty size; tty\r")
        terminal.expect(b"33 91\r\n/dev/pts/")
        terminal.resize(100, 20)
        terminal.type(b"sleep 1; stty size; exit 6\r")
        terminal.expect(b"20 100\r\n")
        assert terminal.wait() == 6
    assert aenv("info", sandbox).returncode == 0


def test_a_sandbox_that_lives_as_long_as_its_shell(node: TestNode, aenv: CommandLine) -> None:
    before = aenv("ls", "-q").stdout
    result = aenv("start", input=b"uname -s\nexit 4\n")
    assert (result.stdout, result.stderr, result.returncode) == (b"Linux\n", b"", 4)
    assert aenv("ls", "-q").stdout == before


def test_a_template_from_a_directory(aenv: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "tree/etc").mkdir(parents=True)
    (tmp_path / "tree/etc/motd").write_text("hello\n")
    result = aenv("template", "import", "--root", "--disk", "64", "--memory", "128", "cli-test", "tree")
    assert result.returncode == 0, result.stderr
    template_id = result.stdout.decode().strip()
    try:
        (listed,) = [entry for entry in json.loads(aenv("template", "ls").stdout) if "cli-test" in entry["names"]]
        assert (listed["templateID"], listed["diskSizeMB"], listed["memoryMB"]) == (template_id, 64, 128)
        again = aenv("template", "import", "--root", "--disk", "64", "cli-test", "tree")
        assert again.returncode == 1
        assert b"exists already" in again.stderr.splitlines()[-1]
    finally:
        assert aenv("template", "rm", "cli-test").stdout == b"cli-test\n"


def test_doctor_knows_a_running_node(node: TestNode, aenv: CommandLine) -> None:
    result = aenv("doctor", "--json", AENV_LISTEN=f"127.0.0.1:{node.port}")
    reports = {report["name"]: report for report in json.loads(result.stdout)}
    assert result.returncode == int(any(report["status"] == "failed" for report in reports.values()))
    assert reports["server"] == {
        "name": "server",
        "status": "ok",
        "detail": f"a server answers at 127.0.0.1:{node.port}",
        "remedy": None,
    }
    assert reports["guest kernel"]["status"] == reports["template base"]["status"] == "ok"
    assert not [report for report in reports.values() if "the check itself broke" in report["detail"]]
