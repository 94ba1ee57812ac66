"""A real edge in front of a real agent, with the control API of ``contract.py``: a node without virtual machines."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from aenv.programs import own_program
from tests.contract import Contract, Record, Routes

AGENT_PORT = 49983


@contextmanager
def running_agent(address: str) -> Iterator[None]:
    """An agent that listens at ``address`` and wants the token of every ``Record``."""
    listen = f"{address}:{AGENT_PORT}"
    with started([own_program("aenv-envd"), "agent", "--listen", listen], subprocess.PIPE, "aenv-envd: listening on"):
        answer = httpx.post(
            f"http://{listen}/init",
            json={"accessToken": Record.token},
            headers={"X-Aenv-Control": "the control plane"},
        )
        assert answer.status_code == 204, answer.text
        yield


@contextmanager
def running_edge(contract: Contract, directory: Path, address: str) -> Iterator[None]:
    """An edge in front of ``contract`` and of the agent at ``address``; sets the contract's ``url``."""
    control, api = directory / "control", directory / "api"
    with contract.serve(api):
        sockets: list[str | Path] = ["--control", control, "--api", api]
        with started([own_program("aenv-edge"), "--listen", "127.0.0.1:0", *sockets], None, "ready"):
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(control))) as client:
                contract.url = "http://" + client.get("http://edge/v1/status").json()["listen"]
            contract.routes = Routes(control, address)
            try:
                yield
            finally:
                contract.routes.close()


@contextmanager
def started(command: Sequence[str | Path], stderr: int | None, ready: str) -> Iterator[None]:
    """Run ``command`` until it says that it is ready and then until the end of the context."""
    stdout = subprocess.PIPE if stderr is None else None
    with subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True) as process:
        output = process.stdout or process.stderr
        assert output is not None
        try:
            for line in output:
                if line.startswith(ready):
                    break
            else:
                raise AssertionError(f"{command[0]} ended before it was ready")
            # Somebody has to read on, or the program blocks when it has something to say.
            reader = threading.Thread(target=output.read)
            reader.start()
            yield
        finally:
            process.terminate()
        reader.join(10)
