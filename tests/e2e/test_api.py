"""The control API of a real node: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import concurrent.futures
import http.client
import re
import time

import httpx
import pytest

from tests.node import TestNode, wait_until


def error(response: httpx.Response) -> tuple[int, str]:
    """The one form errors have."""
    body = response.json()
    assert body["code"] == response.status_code
    assert set(body) == {"code", "message"}
    return response.status_code, body["message"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[]", 400, "object"),
        (b"{}", 400, "templateID"),
        (b'{"templateID": 5}', 400, r"\$\.templateID"),
        (b'{"templateID": "nope"}', 404, "no template 'nope'"),
        (b'{"templateID": "../../etc"}', 404, "no template"),
        (b'{"templateID": "base", "timeout": 0}', 400, "Timeout must be greater than 0"),
        (b'{"templateID": "base", "timeout": 1e99}', 400, "timeout"),
        (b'{"templateID": "base", "timeout": 99999999}', 400, "more than this node allows"),
        (b'{"templateID": "base", "metadata": {"a": 1}}', 400, "metadata"),
        (b'{"templateID": "base", "envVars": {"A=B": "c"}}', 400, "environment variable"),
        (b'{"templateID": "base", "envVars": {"A": "\\u0000"}}', 400, "environment variable"),
        (b'{"templateID": "base", "autoPause": true}', 400, "autoPause is not available"),
        (b'{"templateID": "base", "autoPauseMemory": false}', 400, "needs autoPause"),
        (b'{"templateID": "base", "allow_internet_access": false}', 400, "not available"),
        (b'{"templateID": "base", "network": {"denyOut": ["0.0.0.0/0"]}}', 400, "network.denyOut"),
        (b'{"templateID": "base", "volumeMounts": [{"name": "v", "path": "/v"}]}', 400, "volumeMounts"),
    ],
)
def test_bad_creates_are_refused(node: TestNode, body: bytes, status: int, said: str) -> None:
    response = node.api.post("/v2/sandboxes", content=body)
    code, message = error(response)
    assert code == status
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("env", "said"),
    [({"A": "x" * 128 * 1024}, "'A' is larger"), ({f"A{n}": "x" * 120_000 for n in range(5)}, "'A4' is larger")],
)
def test_variables_that_no_program_could_be_started_with(node: TestNode, env: dict[str, str], said: str) -> None:
    code, message = error(node.api.post("/v2/sandboxes", json={"templateID": "base", "envVars": env}))
    assert (code, said in message) == (400, True), message


@pytest.mark.parametrize("encoding", ["gzip", "br", "nonsense"])
def test_an_encoded_body_is_refused(node: TestNode, encoding: str) -> None:
    response = node.api.post("/v2/sandboxes", content=b"x", headers={"Content-Encoding": encoding})
    assert error(response)[0] == 400


def test_a_long_filter_is_understood(node: TestNode) -> None:
    assert node.api.get("/v2/sandboxes", params={"metadata": "a%3D" + "x" * 30_000}).json() == []


def test_an_oversize_body_is_refused(node: TestNode) -> None:
    assert error(node.api.post("/v2/sandboxes", content=b" " * (1024 * 1024 + 1)))[0] == 413


@pytest.mark.parametrize("path", ["/nope", "/sandboxes/a/b/c", "/v2/sandboxes/%2e%2e/x"])
def test_unknown_paths_are_json_too(node: TestNode, path: str) -> None:
    assert error(node.api.get(path))[0] == 404


def test_unknown_methods_are_json_too(node: TestNode) -> None:
    assert error(node.api.patch("/v2/sandboxes"))[0] == 405


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_unknown_sandboxes(node: TestNode, method: str) -> None:
    assert error(node.api.request(method, "/sandboxes/inothing")) == (404, "there is no sandbox inothing")
    assert error(node.api.post("/sandboxes/inothing/timeout", json={"timeout": 5}))[0] == 404
    assert error(node.api.post("/v2/sandboxes/inothing/connect", json={}))[0] == 404


def test_keys(node: TestNode) -> None:
    for headers in (
        [],
        [("X-API-Key", "e2b_" + "0" * 40)],
        [("X-API-Key", "")],
        [(b"X-API-Key", b"\xff\xfe")],
        [("Authorization", f"Bearer {node.key}")],
        [("X-API-Key", node.key), ("X-API-Key", node.key)],
    ):
        with httpx.Client(base_url=node.url, headers=headers) as client:
            assert error(client.get("/v2/sandboxes"))[0] == 401
            assert client.get("/health").status_code == 204
            assert error(client.get("/nope"))[0] == 401


def test_chunked_bodies_and_keep_alive(node: TestNode) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
    for _ in range(3):
        connection.request(
            "POST", "/v2/sandboxes", iter([b'{"templateID":', b'"nope"}']), {"X-API-Key": node.key}, encode_chunked=True
        )
        response = connection.getresponse()
        assert response.status == 404
        response.read()
    connection.close()


def test_fields_of_a_sandbox(node: TestNode) -> None:
    created = node.create(timeout=100, metadata={"a": "1"})
    identifier = created["sandboxID"]
    try:
        assert re.fullmatch(r"[a-z0-9]+", identifier)
        assert set(created) == {"templateID", "sandboxID", "clientID", "envdVersion", "alias", "envdAccessToken"}
        detail = node.api.get(f"/sandboxes/{identifier}").json()
        assert detail["state"] == "running"
        assert detail["metadata"] == {"a": "1"}
        assert detail["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
        assert (detail["cpuCount"], detail["memoryMB"]) == (1, 512)
        listed = node.api.get("/v2/sandboxes", params={"metadata": "a%3D1"}).json()
        assert [item["sandboxID"] for item in listed] == [identifier]
        assert node.api.get("/v2/sandboxes", params={"metadata": "a%3D2"}).json() == []
        # connect never shortens, and the time it reports does not change form
        response = node.api.post(f"/v2/sandboxes/{identifier}/connect", json={"timeout": 10})
        assert (response.status_code, response.json()["envdAccessToken"]) == (200, created["envdAccessToken"])
        assert node.api.get(f"/sandboxes/{identifier}").json()["endAt"] == detail["endAt"]
        assert node.api.post(f"/sandboxes/{identifier}/refreshes", json={"duration": 500}).status_code == 204
        assert node.api.get(f"/sandboxes/{identifier}").json()["endAt"] > detail["endAt"]
        assert node.api.post(f"/sandboxes/{identifier}/timeout", json={"timeout": 20}).status_code == 204
        assert node.api.get(f"/sandboxes/{identifier}").json()["endAt"] < detail["endAt"]
        assert error(node.api.post(f"/sandboxes/{identifier}/timeout", json={"timeout": -1}))[0] == 400
        logs = node.api.get(f"/sandboxes/{identifier}/logs").json()
        assert any("aenv-envd: ready" in entry["line"] for entry in logs["logs"])
        assert error(node.api.post(f"/sandboxes/{identifier}/pause", json={}))[0] == 501
        in_use = node.api.delete(f"/templates/{created['templateID']}")
        assert error(in_use)[0] == 400
    finally:
        assert node.api.delete(f"/sandboxes/{identifier}").status_code == 204
    status, message = error(node.api.delete(f"/sandboxes/{identifier}"))
    assert (status, "killed by request" in message) == (404, True)


def test_the_token_guards_the_agent(node: TestNode) -> None:
    created = node.create()
    headers = {"E2b-Sandbox-Id": created["sandboxID"], "E2b-Sandbox-Port": "49983"}
    try:
        with httpx.Client(base_url=node.url, headers=headers) as client:
            assert client.get("/health").status_code == 204
            assert client.post("/process.Process/List", json={}).status_code == 401
            wrong = client.post("/process.Process/List", json={}, headers={"X-Access-Token": "no"})
            assert wrong.status_code == 401
            right = client.post(
                "/process.Process/List", json={}, headers={"X-Access-Token": created["envdAccessToken"]}
            )
            assert right.status_code == 200
        # Internal calls stay inside, however they are spelled; httpx would tidy these paths up.
        connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
        for path in ("/init", "//init", "/./init", "/%69nit", "/x/../init", "/shutdown", f"{node.url}/init"):
            connection.request("POST", path, b"{}", {**headers, "X-Access-Token": created["envdAccessToken"]})
            response = connection.getresponse()
            assert (response.status, response.read()[:1]) == (404, b"{"), path
        connection.close()
    finally:
        node.api.delete(f"/sandboxes/{created['sandboxID']}")


def test_an_expired_sandbox_is_killed_on_time(node: TestNode) -> None:
    identifier = node.create(timeout=3)["sandboxID"]
    started = time.monotonic()
    wait_until(lambda: node.api.get(f"/sandboxes/{identifier}").status_code == 404, 10, lambda: "it lives on")
    assert time.monotonic() - started > 1.5
    status, message = error(node.api.get(f"/sandboxes/{identifier}"))
    assert (status, "its timeout ended" in message) == (404, True)
    dead = httpx.get(f"{node.url}/health", headers={"E2b-Sandbox-Id": identifier, "E2b-Sandbox-Port": "49983"})
    assert dead.status_code == 502
    assert dead.json() == {"sandboxId": identifier, "message": "The sandbox was not found", "code": 502}


def test_a_repeated_create_with_one_key_makes_one_sandbox(node: TestNode) -> None:
    def create() -> httpx.Response:
        body = {"templateID": "base", "timeout": 100}
        return httpx.post(
            f"{node.url}/v2/sandboxes",
            json=body,
            headers={"X-API-Key": node.key, "Idempotency-Key": "once"},
            timeout=120,
        )

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [future.result() for future in [pool.submit(create) for _ in range(4)]]
    assert [answer.status_code for answer in answers] == [201] * 4
    assert len({answer.json()["sandboxID"] for answer in answers}) == 1
    other = httpx.post(
        f"{node.url}/v2/sandboxes",
        json={"templateID": "base", "timeout": 101},
        headers={"X-API-Key": node.key, "Idempotency-Key": "once"},
    )
    assert error(other)[0] == 409
    node.api.delete(f"/sandboxes/{answers[0].json()['sandboxID']}")


def test_pages(node: TestNode) -> None:
    made = [node.create(metadata={"pages": "yes"})["sandboxID"] for _ in range(3)]
    try:
        seen: list[str] = []
        query = {"limit": "1", "metadata": "pages%3Dyes"}
        while True:
            response = node.api.get("/v2/sandboxes", params=query)
            seen += [item["sandboxID"] for item in response.json()]
            if "X-Next-Token" not in response.headers:
                break
            query["nextToken"] = response.headers["X-Next-Token"]
        assert seen == made[::-1]
        assert error(node.api.get("/v2/sandboxes", params={"limit": "0"}))[0] == 400
    finally:
        for identifier in made:
            node.api.delete(f"/sandboxes/{identifier}")


def test_ports_inside_are_reachable_by_header_and_by_host(node: TestNode) -> None:
    created = node.create()
    identifier = created["sandboxID"]
    try:
        agent = {
            "E2b-Sandbox-Id": identifier,
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": created["envdAccessToken"],
        }
        port = {"E2b-Sandbox-Id": identifier, "E2b-Sandbox-Port": "8080"}
        closed = httpx.get(node.url, headers=port)
        assert (closed.status_code, closed.json()["message"]) == (
            502,
            "The sandbox is running but port is not open",
        )
        start = {"process": {"cmd": "python3", "args": ["-m", "http.server", "8080", "-d", "/etc"]}, "stdin": False}
        with httpx.stream(
            "POST",
            f"{node.url}/process.Process/Start",
            headers={**agent, "Content-Type": "application/connect+json"},
            content=_envelope(start),
            timeout=60,
        ) as stream:
            assert b"pid" in next(stream.iter_raw())
            # The edge waits a second for a port to open; Python may need longer on a slow machine.
            wait_until(lambda: httpx.get(f"{node.url}/hostname", headers=port).status_code == 200, 30, node.log_tail)
            by_header = httpx.get(f"{node.url}/hostname", headers=port)
            assert (by_header.status_code, by_header.text.strip()) == (200, "sandbox")
            by_host = httpx.get(f"{node.url}/hostname", headers={"Host": f"8080-{identifier}.example.org"}, timeout=30)
            assert (by_host.status_code, by_host.text.strip()) == (200, "sandbox")
        bad = httpx.get(node.url, headers={"E2b-Sandbox-Id": identifier, "E2b-Sandbox-Port": "99999"})
        assert bad.status_code == 400
    finally:
        node.api.delete(f"/sandboxes/{identifier}")


def _envelope(message: object) -> bytes:
    import json

    data = json.dumps(message).encode()
    return b"\0" + len(data).to_bytes(4, "big") + data
