"""``aenv exec`` with the real agent at the other end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.command_line import DEADLINE, CommandLine
from tests.contract import Contract
from tests.node import wait_until


def line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_streams_and_status(aenv: CommandLine) -> None:
    result = aenv("exec", "i1", "--", "sh", "-c", "echo out; echo err >&2; exit 42")
    assert (result.stdout, result.stderr, result.returncode) == (b"out\n", b"err\n", 42)


@pytest.mark.parametrize("number", [6, 9, 15])
def test_death_by_signal_is_128_and_more(aenv: CommandLine, number: int) -> None:
    assert aenv("exec", "i1", "sh", "-c", f"ulimit -c 0; kill -{number} $$").returncode == 128 + number


def test_arguments_are_exact(aenv: CommandLine) -> None:
    words = ["two words", "it's", '"', "$HOME", "`id`", "*", "", "ü", "--", "-n"]
    assert aenv("exec", "i1", "--", "printf", "%s\\0", *words).stdout.decode().split("\0")[:-1] == words


def test_one_argument_is_for_a_shell(aenv: CommandLine) -> None:
    assert aenv("exec", "i1", "echo 'a  b' | tr a-z A-Z").stdout == b"A  B\n"


def test_environment_directory_user(aenv: CommandLine, tmp_path: Path) -> None:
    options = ["-e", "A=x y", "-w", str(tmp_path), "-u", "root"]
    result = aenv("exec", *options, "i1", "sh", "-c", 'echo "$A|$(pwd)|$(id -un)"')
    assert result.stdout.decode() == f"x y|{tmp_path}|root\n"


def test_what_cannot_be_run(aenv: CommandLine) -> None:
    result = aenv("exec", "i1", "no-such-program", "x")
    assert result.returncode == 1
    assert b"no-such-program" in result.stderr
    assert aenv("exec", "-u", "nobody-here", "i1", "true", "x").stderr == b"aenv: invalid username: 'nobody-here'\n"


def test_standard_input_of_any_size(aenv: CommandLine) -> None:
    sent = os.urandom(3_000_000)
    result = aenv("exec", "i1", "cat", input=sent)
    assert result.returncode == 0
    assert result.stdout == sent


def test_standard_input_from_a_file(aenv: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"from a file\n")
    with (tmp_path / "file").open() as file:
        output = subprocess.run(
            aenv.command("exec", "i1", "cat"), env=aenv.environ, stdin=file, capture_output=True, timeout=DEADLINE
        )
    assert (output.stdout, output.returncode) == (b"from a file\n", 0)


def test_output_to_a_file(aenv: CommandLine, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        command = aenv.command("exec", "i1", "seq", "100000")
        subprocess.run(command, env=aenv.environ, stdin=subprocess.DEVNULL, stdout=file, timeout=DEADLINE, check=True)
    assert (tmp_path / "file").read_bytes() == b"".join(b"%d\n" % number for number in range(1, 100_001))


def test_input_that_is_not_read_to_its_end(aenv: CommandLine) -> None:
    result = aenv("exec", "i1", "head", "-c", "4", input=b"12345678" * 1_000_000)
    assert (result.stdout, result.stderr, result.returncode) == (b"1234", b"", 0)
    result = aenv("exec", "i1", "sh", "-c", "exec <&-; sleep 0.3; exit 5", input=b"12345678" * 1_000_000)
    assert (result.stdout, result.stderr, result.returncode) == (b"", b"", 5)


def test_input_that_never_ends_does_not_keep_us(aenv: CommandLine) -> None:
    with aenv.running("exec", "i1", "true", "x") as process:
        assert process.wait(DEADLINE) == 0


def test_no_standard_input(aenv: CommandLine) -> None:
    assert aenv("exec", "-n", "i1", "cat", "-", input=b"not for the command").stdout == b""


def test_an_interactive_conversation_through_pipes(aenv: CommandLine) -> None:
    with aenv.running("exec", "i1", "cat", "-") as process:
        assert process.stdin is not None
        for word in (b"one\n", b"two\n"):
            process.stdin.write(word)
            process.stdin.flush()
            assert line(process) == word
        process.stdin.close()
        assert process.wait(DEADLINE) == 0


def test_an_interrupt_ends_the_process(aenv: CommandLine) -> None:
    with aenv.running("exec", "i1", "sh", "-c", 'trap "echo bye; exit 3" TERM; echo on; sleep 1000 & wait') as process:
        assert line(process) == b"on\n"
        process.send_signal(signal.SIGINT)
        assert line(process) == b"bye\n"
        assert process.wait(DEADLINE) == 3


def test_a_second_interrupt_kills_it(aenv: CommandLine) -> None:
    with aenv.running(
        "exec", "i1", "sh", "-c", 'trap "echo no" TERM; echo on; while :; do sleep 0.05; done'
    ) as process:
        assert line(process) == b"on\n"
        process.send_signal(signal.SIGTERM)
        assert line(process) == b"no\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 128 + 9


def test_a_reader_that_goes_away_ends_the_process(aenv: CommandLine) -> None:
    with aenv.running("exec", "i1", "sh", "-c", "echo $$; exec yes") as process:
        pid = int(line(process))
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(DEADLINE) == 128 + 13
        assert process.stderr is not None
        assert process.stderr.read() == b""
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), DEADLINE, lambda: f"process {pid} runs on")


def test_a_slow_reader_gets_everything_and_does_not_keep_signals_from_us(aenv: CommandLine) -> None:
    with aenv.running("exec", "i1", "sh", "-c", "echo on; exec yes") as process:
        assert line(process) == b"on\n"
        # Nobody reads now: the pipe is full, and an interrupt must still come through.
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        rest = process.stdout.read()
        assert set(rest) <= set(b"y\n")
        assert process.wait(DEADLINE) == 128 + 15


def test_the_sandbox_ends_meanwhile(contract: Contract, aenv: CommandLine) -> None:
    with aenv.running("exec", "i1", "sh", "-c", "echo on; read x; echo off; sleep 1000") as process:
        assert line(process) == b"on\n"
        contract.remove("i1")
        assert process.stdin is not None
        process.stdin.write(b"x\n")
        process.stdin.flush()
        assert process.wait(DEADLINE) == 1
        assert process.stderr is not None
        assert b"there is no sandbox i1" in process.stderr.read()


def test_a_sandbox_whose_agent_does_not_answer(contract: Contract, aenv: CommandLine) -> None:
    assert contract.routes is not None
    contract.routes.address = "127.50.0.99"
    contract.add("i2")
    result = aenv("exec", "i2", "true", "x")
    assert (result.returncode, result.stderr) == (1, b"aenv: The sandbox is running but port is not open\n")


def test_a_paused_sandbox_is_resumed(contract: Contract, aenv: CommandLine) -> None:
    contract.sandboxes["i1"].state = "paused"
    assert aenv("exec", "i1", "echo", "x").stdout == b"x\n"
    assert contract.sandboxes["i1"].state == "running"


def test_files_up_and_down(aenv: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    content = os.urandom(2_000_000)
    (tmp_path / "local").write_bytes(content)
    result = aenv("upload", "i1", "local", f"{tmp_path}/there/")
    assert result.stdout.decode() == f"{tmp_path}/there/local\n"
    assert (tmp_path / "there/local").read_bytes() == content

    assert aenv("upload", "i1", "-", f"{tmp_path}/there/piped", input=b"piped").returncode == 0
    assert aenv("download", "i1", f"{tmp_path}/there/piped", "-").stdout == b"piped"

    assert aenv("download", "i1", f"{tmp_path}/there/piped").stdout == b"piped\n"
    assert (tmp_path / "piped").read_bytes() == b"piped"
    result = aenv("download", "i1", f"{tmp_path}/there/local", "piped")
    assert (result.returncode, result.stderr) == (1, b"aenv: piped exists (--force replaces it)\n")
    assert aenv("download", "-f", "i1", f"{tmp_path}/there/local", "piped").returncode == 0
    assert (tmp_path / "piped").read_bytes() == content

    result = aenv("download", "i1", f"{tmp_path}/there/none", "new")
    assert (result.returncode, result.stdout) == (1, b"")
    assert b"does not exist" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["local", "piped"]
