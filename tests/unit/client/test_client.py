from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aenv.client import Busy, Client, ConnectionLost, Credentials
from aenv.client.http import MAX_ANSWER
from aenv.errors import BadRequest, NotFound, OperationFailed, Unauthorized, Unavailable
from tests.contract import KEY, Contract


async def ids(client: Client, **filters: object) -> list[str]:
    return [info.sandbox_id async for info in client.sandboxes(**filters)]  # type: ignore[arg-type]


async def test_a_sandbox_from_creation_to_deletion(contract: Contract, client: Client) -> None:
    sandbox = await client.create(timeout=60, env={"A": "1"}, metadata={"k": "v"}, internet=False)
    body = contract.sandboxes[sandbox.sandbox_id].body
    assert body == {
        "templateID": "base",
        "timeout": 60,
        "envVars": {"A": "1"},
        "metadata": {"k": "v"},
        "allow_internet_access": False,
    }
    info = await client.info(sandbox.sandbox_id)
    assert (info.state, info.alias, info.metadata, info.internet) == ("running", "base", {"k": "v"}, False)
    assert info.end_at - info.started_at == timedelta(seconds=60)
    await sandbox.set_timeout(1000)
    assert (await sandbox.info()).end_at > datetime.now(UTC) + timedelta(seconds=900)
    await sandbox.keep_alive(30)
    assert contract.refreshes == [30]
    await sandbox.delete()
    with pytest.raises(NotFound, match=f"there is no sandbox {sandbox.sandbox_id}"):
        await sandbox.delete()


async def test_nothing_is_said_that_was_not_asked_for(contract: Contract, client: Client) -> None:
    sandbox = await client.create()
    assert contract.sandboxes[sandbox.sandbox_id].body == {"templateID": "base"}


async def test_a_list_of_several_pages(contract: Contract, client: Client) -> None:
    contract.page = 3
    for number in range(10):
        contract.add(f"i{number}")
    assert await ids(client) == [f"i{number}" for number in reversed(range(10))]
    assert len([path for method, path in contract.requests if method == "GET"]) == 4


async def test_a_list_without_end_ends(contract: Contract, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aenv.client.client._MAX_PAGES", 5)
    contract.page = 1
    for number in range(6):
        contract.add(f"i{number}")
    with pytest.raises(OperationFailed, match="does not end after 5 pages"):
        await ids(client)


async def test_filters(contract: Contract, client: Client) -> None:
    contract.add("i1", metadata={"a b": "c&d=e%", "ü": "1"})
    contract.add("i2", metadata={"a b": "other"}).state = "paused"
    assert await ids(client, metadata={"a b": "c&d=e%", "ü": "1"}) == ["i1"]
    assert await ids(client, states=("paused",)) == ["i2"]
    assert await ids(client, states=("running", "paused")) == ["i2", "i1"]


async def test_attaching_moves_nothing_unless_it_resumes(contract: Contract, client: Client) -> None:
    contract.add("irunning")
    contract.add("ipaused").state = "paused"
    await client.attach("irunning")
    assert ("POST", "/v2/sandboxes/irunning/connect") not in contract.requests
    await client.attach("ipaused")
    assert contract.sandboxes["ipaused"].state == "running"


@pytest.mark.parametrize("sandbox_id", ["", "A", "../templates", "i1/timeout", "i1?x", "i" * 65, "ü"])
async def test_what_is_no_id_never_reaches_the_server(contract: Contract, client: Client, sandbox_id: str) -> None:
    for call in (client.info, client.delete, client.connect, client.attach, client.logs):
        with pytest.raises(NotFound, match="there is no sandbox"):
            await call(sandbox_id)
    assert contract.requests == []


async def test_templates(contract: Contract, client: Client) -> None:
    (template,) = await client.templates()
    assert (template.template_id, template.names, template.memory) == ("tbase", ["base"], 512)
    contract.add("i1")
    with pytest.raises(BadRequest, match="in use"):
        await client.delete_template("tbase")
    await client.delete("i1")
    await client.delete_template("tbase")


async def test_a_wrong_key_says_where_it_is_from(contract: Contract) -> None:
    async with Client(Credentials(contract.url, "the test", "wrong", "E2B_API_KEY")) as client:
        with pytest.raises(Unauthorized, match=r"the API key is wrong \(the key is from E2B_API_KEY\)"):
            await client.check()


async def test_no_key_is_asked_for_when_the_server_is_there(contract: Contract) -> None:
    async with Client(Credentials(contract.url, "the test", None, "nowhere")) as client:
        with pytest.raises(Unauthorized, match=r"no API key for .*aenv auth login"):
            await client.check()


async def test_a_restarting_control_plane_is_waited_for(contract: Contract, client: Client) -> None:
    contract.busy = 3
    await client.create()
    assert len(contract.sandboxes) == 1
    assert len(contract.requests) == 4


async def test_waiting_has_an_end(contract: Contract, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aenv.client.http._RETRY_SECONDS", 0.3)
    contract.busy = 1000
    with pytest.raises(Busy, match="the control plane is starting"):
        await client.check()


async def test_no_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with Client(Credentials(url, "the test", KEY, "the test")) as client:
            with pytest.raises(Unavailable, match=r"connection refused .*aenv serve"):
                await client.check()


async def test_an_unknown_host() -> None:
    async with Client(Credentials("http://aenv.invalid", "the test", KEY, "the test")) as client:
        with pytest.raises(Unavailable, match=r"no server at http://aenv.invalid: .*AENV_URL"):
            await client.check()


async def answering(answer: bytes, encryption: ssl.SSLContext | None = None) -> asyncio.Server:
    """A server that answers every connection with exactly these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=encryption)


async def ask(answer: bytes) -> None:
    server = await answering(answer)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Client(Credentials(url, "the test", KEY, "the test")) as client:
            await client.info("i1")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [(b"<html>", "malformed"), (b"{}", "missing required field"), (b"[]", "Expected `object`"), (b"\xff", "answered")],
)
async def test_another_kind_of_server(body: bytes, complaint: str) -> None:
    with pytest.raises(OperationFailed, match=rf"(?s){complaint}.*is it an AENV server"):
        await ask(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


async def test_an_endless_answer_is_not_read_to_its_end() -> None:
    with pytest.raises(OperationFailed, match=f"longer than {MAX_ANSWER} bytes"):
        await ask(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (MAX_ANSWER + 1))


async def test_an_answer_that_breaks_off() -> None:
    with pytest.raises(ConnectionLost):
        await ask(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")


async def test_no_http_at_all() -> None:
    with pytest.raises(ConnectionLost):
        await ask(b"220 mail.example ESMTP\r\n")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for this machine that no authority has signed, with its key in the same file."""
    file = tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(file), "-out", str(tmp_path / "public.pem")]
    subprocess.run(command, check=True, capture_output=True)
    file.write_text(file.read_text() + (tmp_path / "public.pem").read_text())
    return file


@pytest.mark.parametrize("trusted", [True, False])
async def test_encryption(certificate: Path, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("public.pem")))
    server = await answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", server_side)
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Client(Credentials(url, "the test", KEY, "the test")) as client:
            if trusted:
                await client.check()
            else:
                with pytest.raises(Unavailable, match=r"cannot be trusted: self-signed certificate .*SSL_CERT_FILE"):
                    await client.check()
