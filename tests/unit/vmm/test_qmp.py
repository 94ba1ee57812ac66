"""The QMP client against peers that keep to the protocol, break it, or say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv.errors import VmmFailed
from aenv.vmm.qmp import EVENT_LIMIT, LINE_LIMIT, Qmp

GREETING = b'{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}}, "capabilities": ["oob"]}}\r\n'


class Peer:
    """The other end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *messages: Any) -> None:
        for it in messages:
            self.writer.write(it if isinstance(it, bytes) else json.dumps(it).encode() + b"\r\n")
        await self.writer.drain()

    async def receive(self) -> dict[str, Any]:
        request: dict[str, Any] = json.loads(await self.reader.readline())
        return request

    async def negotiate(self) -> None:
        await self.send(GREETING)
        request = await self.receive()
        assert request["execute"] == "qmp_capabilities"
        await self.send({"return": {}, "id": request["id"]})


Script = Callable[[Peer], Awaitable[None]]
Listen = Callable[[Script], Awaitable[Path]]


@pytest.fixture
async def listen(tmp_path: Path) -> AsyncIterator[Listen]:
    """Listens with a script; the peer keeps the connection open until the test is over."""
    over = asyncio.Event()
    servers: list[asyncio.Server] = []
    talks: set[asyncio.Task[None]] = set()

    async def start(script: Script) -> Path:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            talks.add(task := asyncio.current_task())  # type: ignore[arg-type]
            assert task is not None
            with contextlib.suppress(ConnectionError):
                await script(Peer(reader, writer))
                await over.wait()
            writer.close()

        path = tmp_path / f"{len(servers)}.sock"
        servers.append(await asyncio.start_unix_server(talk, path, limit=1 << 22))
        return path

    yield start
    over.set()
    await asyncio.gather(*talks, return_exceptions=True)
    for server in servers:
        server.close()
        await server.wait_closed()


def answering(*messages: Any) -> Script:
    """Negotiates, then sends ``messages`` in answer to the first command, with its id where they say ``ID``."""

    async def script(peer: Peer) -> None:
        await peer.negotiate()
        request = await peer.receive()
        for it in messages:
            await peer.send({**it, "id": request["id"]} if isinstance(it, dict) and it.get("id") == "ID" else it)

    return script


async def test_a_command_is_answered(listen: Listen) -> None:
    seen = []

    async def script(peer: Peer) -> None:
        await peer.negotiate()
        seen.append(request := await peer.receive())
        await peer.send({"event": "STOP", "timestamp": {}}, {"return": {"running": True}, "id": request["id"]})

    events: list[str] = []
    qmp = await Qmp.connect(await listen(script), on_event=lambda name, _: events.append(name))
    assert await qmp.execute("blockdev-add", node_name="disk0", read_only=True) == {"running": True}
    assert seen[0]["execute"] == "blockdev-add"
    assert seen[0]["arguments"] == {"node-name": "disk0", "read-only": True}
    assert events == ["STOP"]
    assert not qmp.broken
    await qmp.close()


async def test_answers_may_come_in_any_order(listen: Listen) -> None:
    async def script(peer: Peer) -> None:
        await peer.negotiate()
        requests = [await peer.receive() for _ in range(3)]
        for request in reversed(requests):
            await peer.send({"return": request["execute"], "id": request["id"]})

    qmp = await Qmp.connect(await listen(script))
    assert await asyncio.gather(*(qmp.execute(name) for name in "abc")) == ["a", "b", "c"]
    await qmp.close()


async def test_a_refusal_names_command_and_cause(listen: Listen) -> None:
    refusal = {"error": {"class": "GenericError", "desc": "no such device"}, "id": "ID"}
    qmp = await Qmp.connect(await listen(answering(refusal)))
    with pytest.raises(VmmFailed, match=r"device_del: QEMU refused: no such device"):
        await qmp.execute("device_del", id="x")
    assert not qmp.broken
    await qmp.close()


async def test_an_answer_that_comes_too_late_is_nobodys(listen: Listen) -> None:
    async def script(peer: Peer) -> None:
        await peer.negotiate()
        first = await peer.receive()
        second = await peer.receive()
        await peer.send({"return": "late", "id": first["id"]}, {"return": "now", "id": second["id"]})

    qmp = await Qmp.connect(await listen(script))
    with pytest.raises(VmmFailed, match=r"stop: QEMU did not answer within 0\.05 s"):
        await qmp.execute("stop", timeout=0.05)
    assert await qmp.execute("cont") == "now"
    await qmp.close()


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(VmmFailed, match=r"nowhere\.sock"):
        await Qmp.connect(tmp_path / "nowhere.sock")


async def test_a_peer_that_does_not_greet(listen: Listen) -> None:
    async def script(peer: Peer) -> None:
        pass

    with pytest.raises(VmmFailed, match=r"did not greet within 0\.05 s"):
        await Qmp.connect(await listen(script), timeout=0.05)


async def test_a_peer_that_leaves_before_it_greets(listen: Listen) -> None:
    async def script(peer: Peer) -> None:
        peer.writer.close()

    with pytest.raises(VmmFailed, match="closed the monitor"):
        await Qmp.connect(await listen(script))


async def test_a_peer_that_leaves_instead_of_answering(listen: Listen) -> None:
    async def script(peer: Peer) -> None:
        await peer.negotiate()
        await peer.receive()
        peer.writer.close()

    qmp = await Qmp.connect(await listen(script))
    with pytest.raises(VmmFailed, match="stop: QEMU closed the monitor"):
        await qmp.execute("stop")
    assert qmp.broken
    with pytest.raises(VmmFailed, match="cont: QEMU closed the monitor"):
        await qmp.execute("cont")
    await qmp.close()


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (b"garbage\n", "not QMP"),
        (b"\xff\xfe\n", "not QMP"),
        (b"[1]\n", "not QMP"),
        (b"{}\n", "neither answer nor event"),
        (b"[" * 200_000 + b"\n", "not QMP"),
        (b'{"return":' * 100_000 + b"\n", "not QMP"),
        (b"x" * (LINE_LIMIT + 100_000), "a line of more than"),
        (b'{"event": "SPAM"}\n' * (EVENT_LIMIT + 1), "events in a second"),
    ],
    ids=["text", "bytes", "list", "empty", "deep-list", "deep-object", "endless-line", "events"],
)
async def test_a_peer_that_breaks_the_protocol(listen: Listen, message: bytes, cause: str) -> None:
    qmp = await Qmp.connect(await listen(answering(message)))
    with pytest.raises(VmmFailed, match=rf"stop: .*{cause}"):
        await qmp.execute("stop")
    assert qmp.broken
    await qmp.close()


@pytest.mark.parametrize("number", [None, -1, 10**30, "1", True, 0.5, [], {}], ids=repr)
async def test_answers_to_no_question_are_ignored(listen: Listen, number: object) -> None:
    script = answering({"return": "wrong", "id": number}, {"return": "right", "id": "ID"})
    qmp = await Qmp.connect(await listen(script))
    assert await qmp.execute("stop") == "right"
    await qmp.close()


async def test_a_peer_that_does_not_read(listen: Listen) -> None:
    async def script(peer: Peer) -> None:
        await peer.negotiate()
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]

    qmp = await Qmp.connect(await listen(script))
    with pytest.raises(VmmFailed, match="human: QEMU did not answer"):
        await qmp.execute("human", timeout=0.2, text="x" * (8 << 20))
    # Half a line is in the pipe; nothing that is sent after it could be understood.
    with pytest.raises(VmmFailed, match="could not be sent"):
        await qmp.execute("stop")
    await qmp.close()


async def test_descriptors_travel_with_their_command(tmp_path: Path) -> None:
    path = tmp_path / "qmp.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        loop = asyncio.get_running_loop()

        def serve() -> bytes:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(GREETING)
                peer.recv(4096)
                peer.sendall(b'{"return": {}, "id": 0}\r\n')
                request, fds, _, _ = socket.recv_fds(peer, 4096, 4)
                content = os.read(fds[0], 100)
                os.close(fds[0])
                peer.sendall(b'{"return": {}, "id": 1}\r\n')
                return content + b"|" + request

        serving = loop.run_in_executor(None, serve)
        qmp = await Qmp.connect(path)
        reading, writing = os.pipe()
        os.write(writing, b"through the pipe")
        os.close(writing)
        await qmp.execute("getfd", fds=[reading], fdname="state")
        os.close(reading)
        content, _, request = (await serving).partition(b"|")
        assert content == b"through the pipe"
        assert json.loads(request)["arguments"] == {"fdname": "state"}
        await qmp.close()


async def test_close_ends_every_wait(listen: Listen) -> None:
    async def script(peer: Peer) -> None:
        await peer.negotiate()

    qmp = await Qmp.connect(await listen(script))
    waiting = asyncio.create_task(qmp.execute("stop"))
    await asyncio.sleep(0)
    await qmp.close()
    with pytest.raises(VmmFailed, match=r"stop: .*was closed"):
        await waiting
    await qmp.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.lists(st.binary(max_size=200), max_size=5))
def test_noise_never_does_more_than_fail(tmp_path: Path, noise: list[bytes]) -> None:
    async def run() -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for it in noise:
                writer.write(it + b"\n")
            writer.close()

        path = tmp_path / "noise.sock"
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(talk, path)
        try:
            with pytest.raises(VmmFailed):
                await Qmp.connect(path, timeout=5)
        finally:
            server.close()
            await server.wait_closed()

    asyncio.run(run())
