"""``aenv serve``: puts the parts of a node together and runs them until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from aiohttp import web

from aenv.api.app import make_app
from aenv.config import Settings
from aenv.edge import EdgeClient, EdgeProcess
from aenv.errors import AenvError, Conflict, SetupError, Unavailable
from aenv.network import Network
from aenv.node import images, keys
from aenv.node.node import Node
from aenv.node.store import Store
from aenv.templates.store import TemplateStore
from aenv.vmm.qemu import QemuDriver

log = logging.getLogger(__name__)

EDGE_RESTART_PAUSE = 1.0
"""Seconds between two tries to bring a dead edge back."""

EDGE_END_TIMEOUT = 5.0
"""Seconds for the edge to end at our request, which it does in milliseconds."""

HEADER_LIMIT = 512 * 1024
"""Bytes of a header or of a request line; the edge refuses less than that."""

Progress = Callable[[str], None]


def run(settings: Settings, *, progress: Progress = print) -> None:
    """Serve until SIGTERM or SIGINT. Prepares an empty home first, which takes minutes once.

    Raises SetupError and its kin when this machine or this home cannot be served.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    if os.geteuid() != 0:
        raise SetupError("serving needs root: it creates network namespaces", remedy="sudo aenv serve")
    os.umask(0o077)
    # A sandbox takes five descriptors; the usual soft limit, 1024, is for programs that use select(2).
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with _prepared(settings):
        images.prepare(settings, progress)
        asyncio.run(_serve(settings, progress))


@contextmanager
def _prepared(settings: Settings) -> Iterator[None]:
    """Create the directories and hold the lock that makes this the only server of the home."""
    try:
        (settings.home / "logs").mkdir(parents=True, exist_ok=True)
        # Others may pass through, but not list: the VMMs run under an account of their own. What a directory that was
        # there before allows besides that is its owner's business: the home may be /tmp.
        for directory in (settings.home, settings.run, settings.home / "sandboxes"):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(stat.S_IMODE(directory.stat().st_mode) | 0o711)
        lock = (settings.home / "serve.lock").open("a+")
    except OSError as error:
        raise SetupError(
            f"cannot use the home {settings.home}: {error.strerror}", remedy="choose another with --home"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise Conflict(
                f"another server (pid {owner}) uses the home {settings.home}",
                remedy="stop it, or choose another --home",
            ) from error
        with contextlib.suppress(OSError):  # a full disk; the number only serves a message
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        yield
        with contextlib.suppress(OSError):  # in use while sandboxes run on
            settings.run.rmdir()


async def _serve(settings: Settings, progress: Progress) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with AsyncExitStack() as stack:
        store = Store(keys.database(settings))
        stack.callback(store.close)
        first_key = keys.ensure_first_key(settings, store, os.environ.get("AENV_API_KEY"))
        network = Network(settings)
        await network.open()
        stack.push_async_callback(network.close)
        edge_process = EdgeProcess(settings.listen, settings.run, settings.home / "logs")
        await edge_process.ensure()
        edge = await stack.enter_async_context(EdgeClient(edge_process.control))
        driver = await QemuDriver.open(settings.vmm, settings.home)
        node = Node(settings, store, TemplateStore(settings), driver, network, edge)
        await node.open()
        server = await _listen(make_app(settings, store, node), edge_process.api)
        supervisor = asyncio.create_task(_supervise(edge_process, node, stopping))
        progress(_welcome(settings, first_key))
        await stopping.wait()
        log.info("stopping")
        await server.cleanup()
        edge_process.api.unlink(missing_ok=True)
        if settings.sandbox.on_stop == "kill":
            await asyncio.gather(*(node.kill(record.sandbox_id) for record in node.list()), return_exceptions=True)
        left = len(node.list())
        await node.close()
        supervisor.cancel()
        await asyncio.wait([supervisor])
        if left:
            progress(f"stopped; {left} sandboxes run on, the next `aenv serve` takes them over")
        else:
            with contextlib.suppress(Unavailable, TimeoutError):
                await edge.shutdown()
                async with asyncio.timeout(EDGE_END_TIMEOUT):
                    await edge_process.died()


async def _listen(app: web.Application, path: Path) -> web.AppRunner:
    path.unlink(missing_ok=True)  # the lock says that nobody else listens there
    # Bodies come as they are, and headers as large as the edge lets them be: what aiohttp refuses by itself is answered
    # in a form that clients cannot read.
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        auto_decompress=False,
        max_line_size=HEADER_LIMIT,
        max_field_size=HEADER_LIMIT,
    )
    await runner.setup()
    await web.UnixSite(runner, str(path), backlog=1024).start()
    return runner


async def _supervise(edge: EdgeProcess, node: Node, stopping: asyncio.Event) -> None:
    """Bring the edge back whenever it dies: without it, running sandboxes cannot be reached."""
    while not stopping.is_set():
        await edge.died()
        log.error("aenv-edge died; starting it again")
        while not stopping.is_set():
            try:
                await edge.ensure()
                await node.sync_routes()
                break
            except AenvError as error:
                log.error("%s", error)
                await asyncio.sleep(EDGE_RESTART_PAUSE)


def _welcome(settings: Settings, first_key: str | None) -> str:
    lines = [f"AENV serves {settings.home} on http://{settings.listen}"]
    if first_key is not None:
        lines += [f"Your API key, shown this once: {first_key}"]
    return "\n".join(lines)
