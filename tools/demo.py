"""``make demo``: starts a server in a home inside this checkout, runs the quick start against it, stops it."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("AENV_HOME", ROOT / ".cache" / "home"))
START_LIMIT = 30 * 60.0
"""Seconds; the first start builds the guest kernel and a root file system."""


def main() -> int:
    if os.geteuid() != 0:
        print("error: the demo needs root, since it creates network namespaces: sudo make demo", file=sys.stderr)
        return 1
    url = f"http://127.0.0.1:{_free_port()}"
    environment = {
        **os.environ,
        "AENV_HOME": str(HOME),
        "AENV_LISTEN": url.removeprefix("http://"),
        "AENV_API_KEY": f"e2b_{secrets.token_hex(20)}",
        "AENV_SANDBOX_ON_STOP": "kill",
        "AENV_LOG_LEVEL": os.environ.get("AENV_LOG_LEVEL", "warning"),
    }
    sdk = {
        **environment,
        "E2B_API_URL": url,
        "E2B_SANDBOX_URL": url,
        "E2B_API_KEY": environment["AENV_API_KEY"],
    }
    print(f"==> starting a server with the home {HOME}", flush=True)
    started = time.monotonic()
    server = subprocess.Popen([ROOT / ".venv/bin/aenv", "serve"], env=environment, cwd=ROOT)
    try:
        if not _wait_until_healthy(url, server):
            return 1
        print(f"==> it answers after {time.monotonic() - started:.1f} s; now the official E2B SDK:", flush=True)
        return subprocess.run([sys.executable, ROOT / "examples/quickstart.py"], env=sdk, check=False).returncode
    finally:
        server.terminate()
        server.wait()
        print("==> server stopped", flush=True)


def _free_port() -> int:
    for port in (8000, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise SystemExit("error: no free port on 127.0.0.1")


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        if server.poll() is not None:
            print(f"error: the server ended with status {server.returncode}", file=sys.stderr)
            return False
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 204:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    print("error: the server did not answer in time", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
