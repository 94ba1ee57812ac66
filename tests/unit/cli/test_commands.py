"""Commands as a user runs them, against a server."""

from __future__ import annotations

import json
import re
import resource
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from tests.command_line import DEADLINE, CommandLine
from tests.contract import KEY, Contract


def ids(process: subprocess.CompletedProcess[bytes]) -> list[str]:
    assert process.returncode == 0, process.stderr
    return process.stdout.decode().split()


def refused(process: subprocess.CompletedProcess[bytes]) -> str:
    """The one line that a failure is."""
    assert process.returncode == 1
    assert process.stdout == b""
    (line,) = process.stderr.decode().splitlines()
    assert line.startswith("aenv: ")
    return line.removeprefix("aenv: ")


def test_start_detached(contract: Contract, aenv: CommandLine) -> None:
    arguments = ["-d", "--timeout", "60", "-e", "A=1", "-e", "B=x y", "-m", "who=me", "--no-internet"]
    (sandbox_id,) = ids(aenv("start", *arguments))
    assert contract.sandboxes[sandbox_id].body == {
        "templateID": "base",
        "timeout": 60,
        "envVars": {"A": "1", "B": "x y"},
        "metadata": {"who": "me"},
        "allow_internet_access": False,
    }


def test_start_from_a_template_that_does_not_exist(aenv: CommandLine) -> None:
    assert refused(aenv("start", "-d", "nonsense")) == "there is no template 'nonsense'"


def test_list_is_json_in_a_pipe(contract: Contract, aenv: CommandLine) -> None:
    contract.page = 2
    for number in range(5):
        contract.add(f"i{number}", metadata={"n": str(number)})
    listed = json.loads(aenv("list").stdout)
    assert [entry["sandboxID"] for entry in listed] == ["i4", "i3", "i2", "i1", "i0"]
    assert listed[0]["metadata"] == {"n": "4"}
    assert datetime.fromisoformat(listed[0]["endAt"]) > datetime.now(UTC)


def test_list_is_a_table_on_a_terminal(contract: Contract, aenv: CommandLine) -> None:
    contract.add("i" + "x" * 20, metadata={"job": "[bold]\x1b[2J"})
    with aenv.terminal("list", cols=140) as terminal:
        assert terminal.wait() == 0
    heading, _, row = terminal.shown.decode().splitlines()[:3]
    assert re.sub(r"\x1b\[[0-9;]*m", "", heading).split() == (
        ["ID", "TEMPLATE", "STATE", "STARTED", "ENDS", "CPUS", "MEMORY", "METADATA"]
    )
    assert re.fullmatch(r"ix{20} +base +running +\d+s ago +in \dm \d\ds +1 +0.5 GiB +job=\[bold\]\ufffd\[2J *", row)


def test_list_filters(contract: Contract, aenv: CommandLine) -> None:
    contract.add("i1", metadata={"a": "1", "b": "x & y"})
    contract.add("i2", metadata={"a": "1"}).state = "paused"
    assert ids(aenv("ls", "-q")) == ["i2", "i1"]
    assert ids(aenv("ls", "-q", "--state", "paused")) == ["i2"]
    assert ids(aenv("ls", "-q", "-m", "a=1", "-m", "b=x & y")) == ["i1"]
    assert ids(aenv("ls", "-q", "-m", "a=2")) == []


def test_info(contract: Contract, aenv: CommandLine) -> None:
    record = contract.add("i1", metadata={"a": "1"})
    result = aenv("info", "i1")
    assert json.loads(result.stdout)["sandboxID"] == "i1"
    assert record.token.encode() not in result.stdout
    with aenv.terminal("info", "i1") as terminal:
        assert terminal.wait() == 0
    assert "1 CPU, 0.5 GiB memory, 4 GiB disk" in terminal.shown.decode()


def test_timeout(contract: Contract, aenv: CommandLine) -> None:
    record = contract.add("i1")
    assert aenv("timeout", "i1", "3600").returncode == 0
    assert record.end_at > datetime.now(UTC) + timedelta(seconds=3000)


def test_delete(contract: Contract, aenv: CommandLine) -> None:
    for name in ("i1", "i2", "i3"):
        contract.add(name)
    result = aenv("rm", "i1", "gone", "i2", "i1")
    assert result.returncode == 1
    assert sorted(result.stdout.split()) == [b"i1", b"i2"]
    assert result.stderr == b"aenv: there is no sandbox gone\n"
    assert list(contract.sandboxes) == ["i3"]


def test_delete_all(contract: Contract, aenv: CommandLine) -> None:
    contract.page = 3
    for number in range(40):
        contract.add(f"i{number}")
    assert len(ids(aenv("rm", "--all"))) == 40
    assert contract.sandboxes == {}
    assert ids(aenv("rm", "--all")) == []


@pytest.mark.parametrize(("answer", "left"), [(b"y\n", 0), (b"n\n", 2), (b"\x04", 2)])
def test_delete_all_asks_a_person(contract: Contract, aenv: CommandLine, answer: bytes, left: int) -> None:
    contract.add("i1")
    contract.add("i2")
    with aenv.terminal("rm", "--all") as terminal:
        terminal.expect(b"Delete 2 sandboxes? [y/N]: ")
        terminal.type(answer)
        assert terminal.wait() == (0 if left == 0 else 130)
    assert len(contract.sandboxes) == left


def test_logs(contract: Contract, aenv: CommandLine) -> None:
    contract.add("i1")
    contract.console[:] = ["[0.0] Linux", "\x1b[2Jhostile", "aenv-envd: ready"]
    assert aenv("logs", "i1").stdout == b"[0.0] Linux\n\x1b[2Jhostile\naenv-envd: ready\n"
    assert aenv("logs", "-n", "1", "i1").stdout == b"aenv-envd: ready\n"
    with aenv.terminal("logs", "i1") as terminal:
        assert terminal.wait() == 0
    assert "\ufffd[2Jhostile" in terminal.shown.decode()


def test_logs_are_followed_to_the_end_of_the_sandbox(contract: Contract, aenv: CommandLine) -> None:
    contract.add("i1")
    contract.console[:] = ["one", "two"]
    with aenv.running("logs", "-f", "-n", "1", "i1") as following:
        assert following.stdout is not None
        assert following.stdout.readline() == b"two\n"
        contract.console += ["three", "four", "five"]
        assert following.stdout.readline() == b"three\n"
        assert following.stdout.readline() == b"four\n"
        contract.console.append("six")
        assert following.stdout.readline() == b"five\n"
        del contract.sandboxes["i1"]
        assert following.communicate(timeout=DEADLINE) == (b"six\n", b"")
        assert following.returncode == 0


def test_templates(contract: Contract, aenv: CommandLine) -> None:
    assert [entry["names"] for entry in json.loads(aenv("template", "ls").stdout)] == [["base"]]
    with aenv.terminal("template", "list") as terminal:
        assert terminal.wait() == 0
    assert "tbase" in terminal.shown.decode()
    contract.add("i1")
    assert refused(aenv("template", "rm", "tbase")) == "the template is in use by 1 sandboxes"
    del contract.sandboxes["i1"]
    assert aenv("template", "rm", "tbase").stdout == b"tbase\n"


def test_a_sandbox_that_does_not_exist(aenv: CommandLine) -> None:
    for arguments in (["info", "i9"], ["timeout", "i9", "1"], ["logs", "i9"], ["exec", "i9", "ls"], ["cn", "i9"]):
        assert refused(aenv(*arguments)) == "there is no sandbox i9"


def test_a_wrong_key(aenv: CommandLine) -> None:
    assert refused(aenv("ls", AENV_API_KEY="wrong")) == "the API key is wrong (the key is from AENV_API_KEY)"
    assert "AENV_API_KEY is not a key" in refused(aenv("ls", AENV_API_KEY="two words"))


def test_no_server(aenv: CommandLine) -> None:
    message = refused(aenv("ls", AENV_URL="http://127.0.0.1:1"))
    assert message == "no server at http://127.0.0.1:1: connection refused (start one with `aenv serve`)"


def test_a_reader_that_goes_away(contract: Contract, aenv: CommandLine) -> None:
    for number in range(500):
        contract.add(f"i{number}", metadata={"filler": "x" * 200})
    with aenv.running("ls") as listing:
        assert listing.stdout is not None
        listing.stdout.read(10)
        listing.stdout.close()
        assert listing.stderr is not None
        assert listing.stderr.read() == b""
        assert listing.wait(DEADLINE) == 141


def test_login_status_logout(contract: Contract, aenv: CommandLine) -> None:
    url, _ = aenv.environ.pop("AENV_URL"), aenv.environ.pop("AENV_API_KEY")
    file = aenv.directory / ".config/aenv/credentials"
    assert refused(aenv("auth", "login", "--url", url, input=b"wrong\n")).startswith("the API key is wrong")
    assert not file.exists()

    result = aenv("auth", "login", "--url", url, input=KEY.encode() + b"\n")
    assert (result.returncode, result.stdout.decode(), result.stderr) == (0, f"stored in {file}\n", b"")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert ids(aenv("ls", "-q")) == []

    status = json.loads(aenv("auth", "status").stdout)
    assert status == {"url": url, "urlSource": str(file), "key": "…6789", "keySource": str(file), "error": None}

    assert aenv("auth", "logout").returncode == 0
    assert not file.exists()
    assert aenv("auth", "logout").returncode == 0


def test_login_on_a_terminal_does_not_show_the_key(contract: Contract, aenv: CommandLine) -> None:
    url = aenv.environ.pop("AENV_URL")
    del aenv.environ["AENV_API_KEY"]
    with aenv.terminal("auth", "login", "--url", url) as terminal:
        terminal.expect(b": ")
        terminal.type(KEY.encode() + b"\n")
        assert terminal.wait() == 0
    assert KEY.encode() not in terminal.shown


def test_login_says_when_it_will_not_matter(contract: Contract, aenv: CommandLine) -> None:
    result = aenv("auth", "login", input=KEY.encode())
    assert b"AENV_URL is set, and wins over the file" in result.stderr


def test_status_fails_with_what_is_wrong(aenv: CommandLine) -> None:
    result = aenv("auth", "status", "--json", AENV_API_KEY="wrong")
    assert result.returncode == 1
    assert "the API key is wrong" in json.loads(result.stdout)["error"]


def test_a_key_for_the_node_on_this_machine(aenv: CommandLine) -> None:
    node = aenv.directory / "node"
    (key,) = ids(aenv("auth", "create-key", "--name", "test", "--home", str(node)))
    assert re.fullmatch(r"e2b_[0-9a-f]{40}", key)
    assert key.encode() not in (node / "aenv.db").read_bytes()


def test_the_node_s_own_key_is_the_last_resort(contract: Contract, aenv: CommandLine) -> None:
    del aenv.environ["AENV_API_KEY"]
    assert "no API key" in refused(aenv("ls"))
    (aenv.directory / "node").mkdir()
    (aenv.directory / "node/admin.key").write_text(KEY + "\n")
    assert ids(aenv("ls", "-q")) == []


def test_version(aenv: CommandLine) -> None:
    assert re.fullmatch(rb"aenv \d+\.\d+\.\d+\n", aenv("--version").stdout)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(aenv: CommandLine, shell: str) -> None:
    assert b"_AENV_COMPLETE" in aenv("completion", shell).stdout


def test_completion_knows_commands_and_sandboxes(contract: Contract, aenv: CommandLine) -> None:
    contract.add("i123")
    contract.add("i456")

    def completed(line: str) -> list[str]:
        """What a shell is offered for the last word of ``line``."""
        word = str(len(line.split()) - 1)
        result = aenv(_AENV_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=word)
        assert result.stderr == b""
        return [entry.partition(",")[2] for entry in result.stdout.decode().split()]

    assert completed("aenv do") == ["doctor", "download"]
    assert completed("aenv info i1") == ["i123"]
    assert completed("aenv start b") == ["base"]
    aenv.environ["AENV_URL"] = "http://127.0.0.1:1"
    assert completed("aenv info i1") == []


def test_an_error_nobody_thought_of_is_one_line(aenv: CommandLine) -> None:
    (aenv.directory / ".config/aenv/credentials").mkdir(parents=True)
    assert "cannot read" in refused(aenv("ls"))
    broken = "import aenv.client; aenv.client.Client = None; from aenv.cli.main import main; main()"
    command = [sys.executable, "-c", broken, "info", "i1"]
    result = subprocess.run(command, env=aenv.environ, capture_output=True, timeout=DEADLINE, check=False)
    assert re.fullmatch(rb"aenv: internal error: TypeError: .*AENV_DEBUG=1 shows where\)\n", result.stderr)
    environ = {**aenv.environ, "AENV_DEBUG": "1"}
    result = subprocess.run(command, env=environ, capture_output=True, timeout=DEADLINE, check=False)
    assert b"Traceback" in result.stderr


def test_help_is_fast_and_loads_nothing_heavy(aenv: CommandLine) -> None:
    watched = [sys.executable, "-X", "importtime", "-m", "aenv.cli", "--help"]
    loaded = subprocess.run(
        watched, env=aenv.environ, capture_output=True, timeout=DEADLINE, check=True
    ).stderr.decode()
    modules = {line.rsplit("|", 1)[1].strip() for line in loaded.splitlines() if line.startswith("import time:")}
    assert not modules & {"httpx", "rich", "aiohttp", "msgspec", "pyroute2", "asyncio"}

    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert aenv("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.15  # seconds of processor time: on an idle machine, that is what the user waits
