"""Shells: a real terminal on our side, the real agent on the other."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest

from tests.command_line import DEADLINE, CommandLine, Terminal
from tests.contract import Contract
from tests.node import wait_until


def prompt(terminal: Terminal) -> None:
    """Wait for the shell, and make its prompt one that nothing else looks like."""
    wait_until(terminal.is_raw, DEADLINE, lambda: "no shell came")
    terminal.type(b"PS1='re''ady> '\r")
    terminal.expect(b"ready> ")


def test_a_shell_from_start_to_end(contract: Contract, aenv: CommandLine) -> None:
    with aenv.terminal("start", cols=91, rows=17) as terminal:
        terminal.expect(b"deleted when this shell ends")
        prompt(terminal)
        assert len(contract.sandboxes) == 2
        terminal.type(b"stty size; echo $TERM\r")
        terminal.expect(b"17 91\r\nxterm\r\n")
        terminal.expect(b"ready> ")
        terminal.type(b"exit 5\r")
        assert terminal.wait() == 5
        assert not terminal.is_raw()
    assert list(contract.sandboxes) == ["i1"]
    assert contract.refreshes[0] == 300


def test_a_shell_can_leave_its_sandbox(contract: Contract, aenv: CommandLine) -> None:
    with aenv.terminal("start", "--keep") as terminal:
        terminal.expect(b"kept when this shell ends")
        prompt(terminal)
        terminal.type(b"\x04")
        assert terminal.wait() == 0
    assert len(contract.sandboxes) == 2


def test_a_shell_in_a_running_sandbox(contract: Contract, aenv: CommandLine) -> None:
    with aenv.terminal("cn", "i1", "-e", "A=x") as terminal:
        prompt(terminal)
        terminal.type(b"echo [$A]\r")
        terminal.expect(b"[x]\r\n")
        terminal.type(b"exit\r")
        assert terminal.wait() == 0
    assert list(contract.sandboxes) == ["i1"]


def test_the_size_follows(aenv: CommandLine) -> None:
    with aenv.terminal("connect", "i1", cols=80, rows=24) as terminal:
        prompt(terminal)
        terminal.type(b"trap 'echo changed' WINCH\r")
        terminal.expect(b"ready> ")
        terminal.resize(132, 43)
        terminal.expect(b"changed")
        terminal.type(b"stty size\r")
        terminal.expect(b"43 132")


def test_control_keys_belong_to_the_guest(aenv: CommandLine) -> None:
    with aenv.terminal("connect", "i1") as terminal:
        prompt(terminal)
        # The child says that it runs: before, the keys would be for the shell.
        child = b"sh -c 'echo sta\"\"rted; exec sleep 1000'\r"
        terminal.type(child)
        terminal.expect(b"started\r\n")
        terminal.type(b"\x03")
        terminal.expect(b"ready> ")
        terminal.type(b"echo $?\r")
        terminal.expect(b"130\r\n")
        terminal.type(child)
        terminal.expect(b"started\r\n")
        terminal.type(b"\x1a")
        terminal.expect(b"Stopped")
        terminal.type(b"exit 9\r")
        terminal.expect(b"There are stopped jobs")
        terminal.type(b"exit 9\r")
        assert terminal.wait() == 9


def test_pasting_a_lot(aenv: CommandLine) -> None:
    pasted = b"0123456789" * 30_000
    command = "stty raw -echo; echo on; head -c 300000 | sha256sum"
    with aenv.terminal("exec", "-t", "i1", "--", "sh", "-c", command) as terminal:
        terminal.expect(b"on")
        terminal.type(pasted)
        terminal.expect(hashlib.sha256(pasted).hexdigest().encode())
        assert terminal.wait() == 0


def test_the_way_out(contract: Contract, aenv: CommandLine) -> None:
    with aenv.terminal("start") as terminal:
        prompt(terminal)
        terminal.type(b"sleep 1000\r")
        terminal.expect(b"sleep 1000\r\n")
        terminal.type(b"~.")
        assert terminal.wait() == 128 + 1
        assert not terminal.is_raw()
    assert list(contract.sandboxes) == ["i1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_puts_everything_back(contract: Contract, aenv: CommandLine, number: int) -> None:
    with aenv.terminal("start") as terminal:
        prompt(terminal)
        terminal.type(b"echo p''id=$$.\r")
        terminal.expect(b"pid=")
        pid = int(terminal.expect(b"."))
        os.kill(terminal.pid, number)
        assert terminal.wait() == 128 + number
        assert not terminal.is_raw()
    assert list(contract.sandboxes) == ["i1"]
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), DEADLINE, lambda: f"process {pid} runs on")


def test_the_sandbox_ends_under_a_shell(contract: Contract, aenv: CommandLine) -> None:
    with aenv.terminal("connect", "i1") as terminal:
        prompt(terminal)
        contract.remove("i1")
        terminal.type(b"echo\r")
        assert terminal.wait() == 1
        assert b"there is no sandbox i1" in terminal.shown
        assert not terminal.is_raw()


def test_a_script_instead_of_a_person(contract: Contract, aenv: CommandLine) -> None:
    result = aenv("start", input=b"echo out\necho err >&2\nexit 6\n")
    assert (result.stdout, result.stderr, result.returncode) == (b"out\n", b"err\n", 6)
    assert list(contract.sandboxes) == ["i1"]
    assert aenv("connect", "i1", input=b"echo in i1").stdout == b"in i1\n"
