"""Kernel modules that the guest loads before it has a root file system."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from aenv.errors import OperationFailed
from aenv.programs import system_program
from aenv.vmm import command

# In this order, each after what it depends on. Every module costs boot time (10 ms under emulation), so only what a
# guest cannot fetch from the modules disk later: that disk itself needs the first two, and a user image may have no
# modprobe for the others.
EARLY = (
    "virtio_mmio",  # the bus of microvm and Firecracker
    "virtio_blk",
    "virtio_net",
    "virtio_balloon",
    "virtio_rng",
    "vmw_vsock_virtio_transport",
    "overlay",
    "fuse",
)


def canonical(name: str) -> str:
    """``kernel/drivers/char/hw_random/virtio-rng.ko.xz`` → ``virtio_rng``, as the kernel itself calls it."""
    return name.rsplit("/", 1)[-1].split(".ko", 1)[0].replace("-", "_")


def load_order(wanted: Iterable[str], dependencies: Mapping[str, Sequence[str]], builtin: Iterable[str]) -> list[str]:
    """Paths of ``wanted`` modules and all they depend on, dependencies first.

    ``dependencies`` is modules.dep: path → paths it needs. Modules that are built into the kernel are left out.
    OperationFailed for a module that exists nowhere, or for a circle.
    """
    paths = {canonical(path): path for path in dependencies}
    compiled_in = {canonical(path) for path in builtin}
    order: list[str] = []
    open_: list[str] = []

    def visit(path: str) -> None:
        if path in order:
            return
        if path in open_:
            raise OperationFailed(f"kernel modules depend on each other in a circle: {' → '.join([*open_, path])}")
        if path not in dependencies:
            raise OperationFailed(f"the kernel package lacks the module {path}")
        open_.append(path)
        for dependency in dependencies[path]:
            visit(dependency)
        open_.pop()
        order.append(path)

    for name in wanted:
        if canonical(name) in paths:
            visit(paths[canonical(name)])
        elif canonical(name) not in compiled_in:
            raise OperationFailed(f"the kernel package lacks the module {name}")
    return order


def parse_dependencies(text: str) -> dict[str, list[str]]:
    """modules.dep, whose lines list the closure of a module in unloading order: last of it is to be loaded first."""
    found = {}
    for line in text.splitlines():
        path, separator, needs = line.partition(":")
        if separator:
            found[path.strip()] = needs.split()[::-1]
    return found


def index(tree: Path, version: str) -> None:
    """Write modules.dep and its companions into ``tree``/lib/modules/``version``, which modprobe reads in the guest."""
    program = system_program("depmod", "kmod")
    command.run([program, "-b", tree, version], "index the kernel modules", timeout=300)


def early(directory: Path) -> list[tuple[str, bytes]]:
    """File name and content of the modules of ``EARLY`` in loading order, from an indexed modules directory."""
    dependencies = parse_dependencies((directory / "modules.dep").read_text())
    builtin = (directory / "modules.builtin").read_text().splitlines()
    return [(f"{canonical(path)}.ko", _unpacked(directory / path)) for path in load_order(EARLY, dependencies, builtin)]


def _unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    try:
        if path.suffix == ".xz":
            data = lzma.decompress(data)
        elif path.suffix == ".gz":
            data = zlib.decompress(data, 31)
    except (lzma.LZMAError, zlib.error) as error:
        raise OperationFailed(f"the kernel module {path.name} is damaged: {error}") from error
    if path.suffix == ".zst":
        with path.open("rb") as file:
            data = command.run([system_program("zstd", "zstd"), "-dc"], f"unpack {path.name}", timeout=60, stdin=file)
    if not data.startswith(b"\x7fELF"):
        raise OperationFailed(f"the kernel module {path.name} is not an ELF file")
    return data
