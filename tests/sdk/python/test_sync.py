"""The synchronous Python SDK, unmodified, against a running node (E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY)."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
    TimeoutException,
)


def test_a_command_has_output_and_an_exit_code(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)


def test_it_is_a_machine_of_its_own(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("uname -s").stdout == "Linux\n"
    assert sandbox.commands.run("whoami; pwd").stdout == "user\n/home/user\n"
    assert sandbox.commands.run("id -u", user="root").stdout == "0\n"
    assert sandbox.commands.run("sudo id -u").stdout == "0\n"
    assert sandbox.commands.run("sudo dmesg | head -c 1").exit_code == 0


def test_failures_carry_the_exit_code(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as failure:
        sandbox.commands.run("echo partial; exit 42")
    assert failure.value.exit_code == 42
    assert failure.value.stdout == "partial\n"


def test_output_arrives_while_the_command_runs(sandbox: Sandbox) -> None:
    first = threading.Event()
    handle = sandbox.commands.run("echo one; read line; echo $line", background=True, stdin=True)
    seen: list[str] = []

    def collect() -> None:
        for stdout, _, _ in handle:
            if stdout:
                seen.append(stdout)
                first.set()

    collector = threading.Thread(target=collect)
    collector.start()
    assert first.wait(20), "the first line must not wait for the end of the command"
    sandbox.commands.send_stdin(handle.pid, "two\n")
    collector.join(20)
    assert "".join(seen) == "one\ntwo\n"


def test_background_commands_are_listed_and_killed(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 300", background=True)
    assert handle.pid in [process.pid for process in sandbox.commands.list()]
    assert sandbox.commands.kill(handle.pid) is True
    with pytest.raises(CommandExitException):
        handle.wait()
    assert sandbox.commands.kill(handle.pid) is False
    with pytest.raises(CommandExitException):
        sandbox.commands.run(f"kill -0 {handle.pid}")


def test_a_command_outlives_its_client(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("read line; echo got $line", background=True, stdin=True)
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    sandbox.commands.send_stdin(handle.pid, "it\n")
    assert again.wait().stdout == "got it\n"


def test_a_timeout_is_a_timeout(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 30", timeout=2)


def test_environment(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("echo $FROM_CREATE").stdout == "yes\n"
    assert sandbox.commands.run("echo $A$FROM_CREATE", envs={"A": "a", "FROM_CREATE": "no"}).stdout == "ano\n"
    assert sandbox.commands.run("echo [$A]").stdout == "[]\n"
    assert sandbox.commands.run("echo $E2B_SANDBOX $E2B_SANDBOX_ID").stdout == f"true {sandbox.sandbox_id}\n"


def test_working_directory(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    with pytest.raises(InvalidArgumentException, match="does not exist"):
        sandbox.commands.run("pwd", cwd="/no/such/place")


def test_pty(sandbox: Sandbox) -> None:
    from e2b import PtySize

    terminal = sandbox.pty.create(PtySize(rows=20, cols=100))
    sandbox.pty.send_stdin(terminal.pid, b"tput cols; exit 5\n")
    output = b""
    with pytest.raises(CommandExitException) as end:
        for _, _, data in terminal:
            output += data or b""
        terminal.wait()
    assert b"100" in output
    assert end.value.exit_code == 5


def test_pty_resize(sandbox: Sandbox) -> None:
    from e2b import PtySize

    terminal = sandbox.pty.create(PtySize(rows=20, cols=80))
    sandbox.pty.resize(terminal.pid, PtySize(rows=30, cols=133))
    sandbox.pty.send_stdin(terminal.pid, b"tput cols; exit\n")
    output = b"".join(data or b"" for _, _, data in terminal)
    assert b"133" in output


def test_files(sandbox: Sandbox) -> None:
    name = f"/home/user/{uuid.uuid4().hex}"
    written = sandbox.files.write(f"{name}/a.txt", "hällo\n")
    assert written.path == f"{name}/a.txt"
    assert sandbox.files.read(f"{name}/a.txt") == "hällo\n"
    assert sandbox.commands.run(f"stat -c '%U %a' {name}/a.txt").stdout == "user 644\n"
    sandbox.files.write(f"{name}/b.bin", bytes(range(256)))
    assert bytes(sandbox.files.read(f"{name}/b.bin", format="bytes")) == bytes(range(256))
    listed = sandbox.files.list(name)
    assert [(entry.name, entry.type) for entry in listed] == [("a.txt", FileType.FILE), ("b.bin", FileType.FILE)]
    assert sandbox.files.make_dir(f"{name}/d") is True
    assert sandbox.files.make_dir(f"{name}/d") is False
    renamed = sandbox.files.rename(f"{name}/a.txt", f"{name}/d/c.txt")
    assert renamed.path == f"{name}/d/c.txt"
    assert sandbox.files.exists(f"{name}/a.txt") is False
    info = sandbox.files.get_info(f"{name}/d/c.txt")
    assert (info.size, info.permissions, info.owner) == (7, "-rw-r--r--", "user")
    sandbox.files.remove(name)
    assert sandbox.files.exists(name) is False
    with pytest.raises(NotFoundException):
        sandbox.files.read(f"{name}/a.txt")


def test_large_files_arrive_whole(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 4096 * 16
    sandbox.files.write("/tmp/large", data)
    assert sandbox.commands.run("stat -c %s /tmp/large").stdout == f"{len(data)}\n"
    assert bytes(sandbox.files.read("/tmp/large", format="bytes")) == data
    sandbox.files.remove("/tmp/large")


def test_several_files_at_once(sandbox: Sandbox) -> None:
    entries: Any = [{"path": f"/tmp/many/{number}/f.txt", "data": str(number)} for number in range(5)]
    written = sandbox.files.write_files(entries)
    assert [entry.path for entry in written] == [entry["path"] for entry in entries]
    assert sandbox.files.read("/tmp/many/3/f.txt") == "3"


def test_lists_and_info(sandbox: Sandbox) -> None:
    found = Sandbox.list().next_items()
    mine = next(item for item in found if item.sandbox_id == sandbox.sandbox_id)
    assert mine.metadata == {"suite": "sync"}
    info = sandbox.get_info()
    assert (info.sandbox_id, info.name) == (sandbox.sandbox_id, "base")
    assert info.end_at > info.started_at
    assert sandbox.is_running() is True


def test_connect_gives_the_same_sandbox(sandbox: Sandbox) -> None:
    same = Sandbox.connect(sandbox.sandbox_id)
    assert same.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == sandbox.sandbox_id


def test_set_timeout_moves_the_end(sandbox: Sandbox) -> None:
    before = sandbox.get_info().end_at
    sandbox.set_timeout(600)
    assert sandbox.get_info().end_at > before


def test_kill_ends_it() -> None:
    short = Sandbox.create(timeout=60)
    assert short.kill() is True
    assert short.is_running() is False
    assert Sandbox.kill(short.sandbox_id) is False
    with pytest.raises(NotFoundException):
        Sandbox.connect(short.sandbox_id)


def test_a_command_whose_sandbox_is_killed_says_so() -> None:
    short = Sandbox.create(timeout=60)
    handle = short.commands.run("sleep 100", background=True)
    killer = threading.Timer(0.5, short.kill)
    killer.start()
    with pytest.raises(TimeoutException, match="sandbox was killed or reached its end of life"):
        handle.wait()
    killer.join()


def test_wrong_keys_and_unknown_templates() -> None:
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)
    with pytest.raises(Exception, match="no template 'nope'"):
        Sandbox.create("nope")
