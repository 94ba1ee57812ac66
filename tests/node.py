"""A real node for tests: ``aenv serve`` as its own process, in a home of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

START_LIMIT = 900.0
"""Seconds; the first start of an empty home builds its guest kernel and base template."""


class TestNode:
    """``start`` and ``stop`` may be repeated on one home; ``destroy`` removes every trace of it."""

    __test__ = False

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        self.key = f"e2b_{secrets.token_hex(20)}"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home.parent / f"{home.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._environment = environment
        self.api = httpx.Client(base_url=self.url, headers={"X-API-Key": self.key}, timeout=120)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AENV_", "E2B_"))},
            **{name: os.environ[name] for name in ("AENV_CACHE",) if name in os.environ},
            "AENV_HOME": str(self.home),
            "AENV_LISTEN": f"127.0.0.1:{self.port}",
            "AENV_API_KEY": self.key,
            "AENV_LOG_LEVEL": "debug",
            **self._environment,
        }

    @property
    def sdk_environment(self) -> Mapping[str, str]:
        return {
            **self.environment,
            "E2B_API_URL": self.url,
            "E2B_SANDBOX_URL": self.url,
            "E2B_API_KEY": self.key,
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "aenv.cli", *arguments]

    def start(self) -> None:
        """Start the server and return when it answers."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command("serve"), env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        wait_until(self.is_healthy, START_LIMIT, lambda: f"the server did not start:\n{self.log_tail()}", self.process)

    def is_healthy(self) -> bool:
        try:
            return self.api.get("/health", timeout=5).status_code == 204
        except httpx.TransportError:
            return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the server and wait for its end; returns its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def destroy(self) -> None:
        if self.process is None or self.process.poll() is not None:
            self.start()
        for sandbox in self.api.get("/v2/sandboxes").json():
            self.api.delete(f"/sandboxes/{sandbox['sandboxID']}")
        self.stop()
        self.api.close()
        shutil.rmtree(self.home)

    def create(self, **body: object) -> dict[str, str]:
        """Create a sandbox over the API and return its JSON."""
        response = self.api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 120, **body})
        assert response.status_code == 201, f"{response.status_code} {response.text}\n{self.log_tail()}"
        answer: dict[str, str] = response.json()
        return answer

    def log_tail(self, size: int = 6000) -> str:
        return self.log.read_bytes()[-size:].decode("utf-8", "replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(
    condition: Callable[[], bool],
    limit: float,
    explain: Callable[[], str],
    process: subprocess.Popen[bytes] | None = None,
) -> None:
    """Poll a condition of another process; fail with ``explain()`` after ``limit`` seconds, or when it ends."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, explain()
        assert process is None or process.poll() is None, explain()
        time.sleep(0.02)
