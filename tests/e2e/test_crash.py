"""What survives the death of which process, and what must not remain."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from aenv.config import Settings
from aenv.vmm import process
from tests.e2e.conftest import share_images
from tests.node import TestNode, wait_until


def vmms(node: TestNode) -> dict[str, int]:
    """Pids of the VMMs of a node, by sandbox."""
    return {directory.name: identity.pid for identity, directory in process.find(node.home / "sandboxes")}


def traces(node: TestNode) -> dict[str, object]:
    """Everything that belongs to sandboxes of a node on this machine."""
    settings = Settings(home=node.home)
    links = subprocess.run(["ip", "-d", "link"], capture_output=True, text=True, check=True).stdout
    namespaces = settings.run / "netns"
    return {
        "vmms": vmms(node),
        "links": links.count(f"aenv:{settings.tag}"),
        "namespaces": sorted(entry.name for entry in namespaces.iterdir() if entry.name.isdigit()),
        "directories": sorted(entry.name for entry in (node.home / "sandboxes").iterdir()),
    }


def nothing_left(node: TestNode) -> bool:
    return traces(node) == {"vmms": {}, "links": 0, "namespaces": [], "directories": []}


def answers(node: TestNode, identifier: str) -> bool:
    headers = {"E2b-Sandbox-Id": identifier, "E2b-Sandbox-Port": "49983"}
    try:
        return httpx.get(f"{node.url}/health", headers=headers, timeout=5).status_code == 204
    except httpx.TransportError:
        return False


def descriptors(node: TestNode) -> int:
    """How many descriptors of processes and of their output the server holds."""
    assert node.process is not None
    command = ["ls", "-l", f"/proc/{node.process.pid}/fd"]
    files = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return files.count("pidfd") + files.count("memfd")


def test_an_ended_sandbox_holds_no_descriptors(own: TestNode) -> None:
    before = descriptors(own)
    identifier = own.create()["sandboxID"]
    assert descriptors(own) > before
    own.api.delete(f"/sandboxes/{identifier}")
    assert descriptors(own) == before
    lost = own.create()["sandboxID"]
    os.kill(vmms(own)[lost], signal.SIGKILL)
    wait_until(lambda: nothing_left(own), 5, lambda: str(traces(own)))
    wait_until(lambda: descriptors(own) == before, 5, lambda: str(descriptors(own)))


def test_five_sandboxes_outlive_a_killed_server(own: TestNode) -> None:
    made = [own.create(timeout=300) for _ in range(5)]
    identifiers = [sandbox["sandboxID"] for sandbox in made]
    pids = vmms(own)
    assert sorted(pids) == sorted(identifiers)
    assert own.stop(signal.SIGKILL) == -signal.SIGKILL
    assert all(answers(own, identifier) for identifier in identifiers), "they answer even while no server runs"
    refused = httpx.get(f"{own.url}/v2/sandboxes", headers={"X-API-Key": own.key})
    assert (refused.status_code, refused.json()["code"], refused.headers.get("Retry-After")) == (503, 503, "1")
    own.start()
    assert all(answers(own, identifier) for identifier in identifiers)
    assert vmms(own) == pids
    listed = own.api.get("/v2/sandboxes").json()
    assert sorted(item["sandboxID"] for item in listed) == sorted(identifiers)
    for identifier in identifiers:
        assert own.api.delete(f"/sandboxes/{identifier}").status_code == 204
    assert nothing_left(own), traces(own)


def test_a_killed_vmm_is_noticed_at_once_and_nothing_of_it_remains(own: TestNode) -> None:
    identifier = own.create()["sandboxID"]
    os.kill(vmms(own)[identifier], signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: own.api.get(f"/sandboxes/{identifier}").status_code == 404, 1.0, lambda: "not noticed in 1 s")
    print(f"noticed after {1000 * (time.monotonic() - killed):.0f} ms")
    assert "its VMM ended: signal 9" in own.api.get(f"/sandboxes/{identifier}").json()["message"]
    wait_until(lambda: nothing_left(own), 5, lambda: str(traces(own)))


def test_a_vmm_that_dies_while_no_server_runs_is_found_out(own: TestNode) -> None:
    lost, kept = own.create()["sandboxID"], own.create()["sandboxID"]
    own.stop(signal.SIGKILL)
    os.kill(vmms(own)[lost], signal.SIGKILL)
    own.start()
    wait_until(lambda: own.api.get(f"/sandboxes/{lost}").status_code == 404, 5, own.log_tail)
    assert "its VMM ended" in own.api.get(f"/sandboxes/{lost}").json()["message"]
    assert answers(own, kept)
    wait_until(lambda: list(vmms(own)) == [kept] and traces(own)["directories"] == [kept], 5, lambda: str(traces(own)))


@pytest.mark.parametrize("delay", [0.02, 0.1, 0.3, 1.0])
def test_a_server_killed_during_a_start_leaves_nothing(own: TestNode, delay: float) -> None:
    def create() -> None:
        # The connection breaks when the server dies; that is the point.
        with contextlib.suppress(httpx.TransportError):
            httpx.post(
                f"{own.url}/v2/sandboxes",
                json={"templateID": "base"},
                headers={"X-API-Key": own.key},
                timeout=60,
            )

    request = threading.Thread(target=create)
    request.start()
    wait_until(lambda: any((own.home / "sandboxes").iterdir()), 10, own.log_tail)
    threading.Event().wait(delay)
    own.stop(signal.SIGKILL)
    request.join()
    own.start()
    wait_until(lambda: nothing_left(own), 10, lambda: f"{traces(own)}\n{own.log_tail()}")
    assert own.api.get("/v2/sandboxes").json() == []


def test_a_dead_edge_comes_back(own: TestNode) -> None:
    identifier = own.create()["sandboxID"]
    pid = int(
        subprocess.run(
            ["pgrep", "-f", f"aenv-edge --listen 127.0.0.1:{own.port}"], capture_output=True, check=True
        ).stdout
    )
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: answers(own, identifier), 10, own.log_tail)
    assert own.api.get(f"/sandboxes/{identifier}").status_code == 200


def test_stopping_keeps_sandboxes_and_starting_takes_them_over(own: TestNode) -> None:
    identifier = own.create()["sandboxID"]
    assert own.stop() == 0
    assert answers(own, identifier)
    own.start()
    assert own.api.get(f"/sandboxes/{identifier}").json()["state"] == "running"


def test_a_stop_without_sandboxes_leaves_nothing_running(own: TestNode) -> None:
    own.api.delete(f"/sandboxes/{own.create()['sandboxID']}")
    assert own.stop() == 0
    assert not Settings(home=own.home).run.exists()
    with socket.create_server(("127.0.0.1", own.port)):
        pass  # the port is free again
    own.start()


def test_a_sandbox_that_expires_while_no_server_runs_is_ended_at_the_start(own: TestNode) -> None:
    identifier = own.create(timeout=2)["sandboxID"]
    own.stop(signal.SIGKILL)
    wait_until(lambda: time.time() > 0 and _expired(own), 10, lambda: "")
    own.start()
    wait_until(lambda: nothing_left(own), 10, own.log_tail)
    assert "its timeout ended" in own.api.get(f"/sandboxes/{identifier}").json()["message"]


def _expired(node: TestNode) -> bool:
    import sqlite3

    import msgspec

    from aenv.model import Sandbox

    with sqlite3.connect(f"file:{node.home}/aenv.db?mode=ro", uri=True) as database:
        (data,) = database.execute("SELECT record FROM sandboxes").fetchone()
    return msgspec.json.decode(data, type=Sandbox).end_at.timestamp() < time.time()


@pytest.fixture
def small(node: TestNode, tmp_path: Path) -> Iterator[TestNode]:
    """A node whose home has little room."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "small", tmp_path], check=True)
    try:
        home = tmp_path / "home"
        home.mkdir()
        for part in ("kernels", "templates"):
            (home / part).symlink_to(node.home / part)
        made = TestNode(home)
        made.start()
        yield made
        (tmp_path / "filler").unlink(missing_ok=True)
        made.destroy()
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def fill(file: Path) -> None:
    """Take all the space there is on the file system of ``file``."""
    with file.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        while True:
            stream.write(bytes(4096))


def test_a_full_disk_hurts_nobody_who_runs(small: TestNode) -> None:
    kept, ended = (small.create(timeout=300)["sandboxID"] for _ in range(2))
    filler = small.home.parent / "filler"
    fill(filler)
    refused = small.api.post("/v2/sandboxes", json={"templateID": "base"})
    assert (refused.status_code, refused.json()["code"]) == (507, 507)
    assert "the disk is full" in refused.json()["message"]
    assert sorted(vmms(small)) == sorted([kept, ended]) == traces(small)["directories"]
    small.stop(signal.SIGKILL)
    small.start()
    assert answers(small, kept)
    assert small.api.delete(f"/sandboxes/{ended}").status_code == 204
    assert list(vmms(small)) == [kept] == traces(small)["directories"]
    filler.unlink()
    small.api.delete(f"/sandboxes/{small.create()['sandboxID']}")


def test_two_servers_on_one_home(own: TestNode) -> None:
    second = subprocess.run(
        own.command("serve", "--listen", "127.0.0.1:1"),
        env=own.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 1
    assert f"another server (pid {own.process.pid if own.process else 0}) uses the home" in second.stderr
    assert "Traceback" not in second.stderr
    assert own.is_healthy()


def test_a_taken_port_is_named(own: TestNode, tmp_path: Path) -> None:
    second = subprocess.run(
        own.command("serve", "--home", str(share_images(own.home, tmp_path / "copy"))),
        env={**own.environment, "AENV_HOME": str(tmp_path / "copy")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 1
    assert f"127.0.0.1:{own.port}" in second.stderr
    assert "--listen" in second.stderr
    assert "Traceback" not in second.stderr
