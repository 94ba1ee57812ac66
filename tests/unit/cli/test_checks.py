from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner

import aenv
from aenv.cli import checks
from aenv.cli.main import cli
from aenv.config import Settings
from aenv.errors import SetupError


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def test_every_check_reports_and_none_breaks(settings: Settings) -> None:
    reports = list(checks.run(settings))
    assert {report.name for report in reports} == {name for name, _ in checks.CHECKS}
    assert [report for report in reports if "the check itself broke" in report.detail] == []
    assert all(report.remedy for report in reports if report.status == "failed")
    assert not settings.home.exists()


def test_a_check_that_breaks_is_a_finding(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Settings) -> NoReturn:
        raise ZeroDivisionError("oops")

    def missing(_: Settings) -> NoReturn:
        raise SetupError("no such thing", remedy="get one")

    monkeypatch.setattr(checks, "CHECKS", [("a", broken), ("b", missing)])
    assert list(checks.run(settings)) == [
        ("a", "failed", "the check itself broke: ZeroDivisionError: oops", None),
        ("b", "failed", "no such thing", "get one"),
    ]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("failed", 1)])
def test_only_a_failure_is_a_failure(status: checks.Status, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = checks.Finding(status, "detail", "remedy")
    monkeypatch.setattr(checks, "CHECKS", [("first", lambda _: finding), ("second", lambda _: [finding, finding])])
    result = CliRunner().invoke(cli, ["doctor"], standalone_mode=False)
    assert result.return_value == code
    assert ("→ remedy" in result.output) == (status != "ok")
    result = CliRunner().invoke(cli, ["doctor", "--json"], standalone_mode=False)
    assert result.return_value == code
    assert len(json.loads(result.output)) == 3


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """A port that answers like this; None: nobody listens there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listen = "{}:{}".format(*listener.getsockname())
        if answer is None:
            listener.close()
            yield listen
            return
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listen
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "status", "detail"),
    [
        (None, "ok", "no server runs, {} is free"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "ok", "a server answers at {}"),
        (b"HTTP/1.1 503 Unavailable\r\n\r\n", "warning", "the edge answers at {}"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "failed", "another program listens at {}"),
        (b"220 mail ESMTP\r\n", "failed", "another program listens at {}"),
        (b"", "failed", "another program listens at {}"),
    ],
)
def test_who_is_at_the_port(answer: bytes | None, status: str, detail: str) -> None:
    with listening(answer) as listen:
        finding = checks.server(Settings(listen=listen))
    assert finding.status == status
    assert finding.detail.startswith(detail.format(listen))


def test_an_address_that_is_not_ours() -> None:
    finding = checks.server(Settings(listen="192.0.2.1:8000"))
    assert finding.status == "failed"


def test_missing_programs_name_their_packages(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_PROGRAMS", {"tar": "tar", "no-such-a": "package-a", "no-such-b": "package-a"})
    assert checks.system_programs(settings) == (
        "failed",
        "missing: no-such-a, no-such-b",
        "apt-get install package-a",
    )


def test_no_package_that_the_code_needs_is_forgotten() -> None:
    """Those of every program of the distribution that is started by name."""
    used = {"qemu-utils"}
    for path in Path(aenv.__file__).parent.rglob("*.py"):
        used |= set(re.findall(r'system_program\("[^"]+", "([^"]+)"\)', path.read_text()))
    assert "e2fsprogs" in used
    assert used - {"qemu-system-x86", "iptables"} <= set(checks._PROGRAMS.values())


@pytest.mark.parametrize("path", ["/dev/null", "/dev/no-such-device", "/dev"])
def test_devices(path: str) -> None:
    finding = checks._device(Path(path), "the remedy", "failed")
    assert finding.status == ("ok" if path == "/dev/null" else "failed")
