"""The official E2B SDK against AENV: a real virtual machine, in a few calls.

export E2B_API_URL=http://127.0.0.1:8000 E2B_SANDBOX_URL=http://127.0.0.1:8000 E2B_API_KEY=e2b_…
python examples/quickstart.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from e2b import CommandExitException, Sandbox


@contextmanager
def step(what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"  {what:<58} {1000 * (time.monotonic() - started):8.0f} ms")


def main() -> None:
    with step("create a sandbox (a microVM boots, its agent answers)"):
        sandbox = Sandbox.create(timeout=120, metadata={"purpose": "demo"}, envs={"GREETING": "hello"})
    try:
        with step("run a command"):
            kernel = sandbox.commands.run("uname -sr").stdout.strip()
        print(f"      its kernel: {kernel}")
        with step("run Python in it"):
            answer = sandbox.commands.run(
                "python3 -c 'import os; print(os.environ[\"GREETING\"], 6 * 7)'"
            ).stdout.strip()
        print(f"      it said: {answer}")
        with step("write a file and read it back"):
            sandbox.files.write("/home/user/notes/today.txt", "remember the milk\n")
            text = sandbox.files.read("/home/user/notes/today.txt")
        print(f"      it holds: {text.strip()}")
        with step("stream the output of a running command"):
            lines: list[str] = []
            sandbox.commands.run("for i in 1 2 3; do echo line $i; done", on_stdout=lines.append)
        print(f"      streamed: {''.join(lines).split(chr(10))[:-1]}")
        with step("see a command fail"):
            try:
                sandbox.commands.run("exit 3")
            except CommandExitException as error:
                print(f"      exit code: {error.exit_code}")
        with step("talk to a server inside the sandbox"):
            handle = sandbox.commands.run("python3 -m http.server 8080 --directory /home/user", background=True)
            listing = sandbox.commands.run("curl -s --retry 20 --retry-connrefused --retry-delay 1 localhost:8080/")
            handle.kill()
        print(f"      it lists: {'notes/' in listing.stdout}")
        with step("list the sandboxes"):
            found = [info.sandbox_id for info in Sandbox.list().next_items()]
        print(f"      ours is there: {sandbox.sandbox_id in found}")
    finally:
        with step("kill the sandbox"):
            sandbox.kill()


if __name__ == "__main__":
    main()
