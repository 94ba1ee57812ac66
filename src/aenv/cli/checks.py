"""What a machine needs to run a node, one small function a check.

A check returns what it found, or raises: a SetupError is the finding with its remedy, anything else is reported as a
check that broke. None of them changes the machine.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from aenv import programs
from aenv.config import Settings
from aenv.errors import AenvError

Status = Literal["ok", "warning", "failed"]

GIB = 1 << 30
_EARLIEST = 1_767_225_600  # 2026-01-01
_UNSYNCHRONISED = 0x0040  # STA_UNSYNC


class Finding(NamedTuple):
    """``warning``: a node runs, but something is missing or tight. ``failed``: a node does not run like this."""

    status: Status
    detail: str
    remedy: str | None = None


class Report(NamedTuple):
    name: str
    status: Status
    detail: str
    remedy: str | None


Check = Callable[[Settings], "Finding | list[Finding]"]


def run(settings: Settings) -> Iterator[Report]:
    """Every check in turn."""
    for name, check in CHECKS:
        try:
            found = check(settings)
        except AenvError as error:
            found = Finding("failed", error.message, error.remedy)
        except Exception as error:
            found = Finding("failed", f"the check itself broke: {type(error).__name__}: {error}")
        for finding in [found] if isinstance(found, Finding) else found:
            yield Report(name, *finding)


def kernel(_: Settings) -> Finding:
    system, release, machine = platform.system(), platform.release(), platform.machine()
    if system != "Linux" or machine != "x86_64":
        return Finding("failed", f"{system} on {machine}", "a node needs Linux on x86_64")
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in release.split(".")[:2])
    if (major, minor) < (5, 10):
        return Finding("failed", release, "use Linux 5.10 or newer")
    return Finding("ok", release)


def privileges(_: Settings) -> Finding:
    if os.geteuid() != 0:
        return Finding("failed", f"running as user {os.geteuid()}", "sudo aenv doctor")
    return Finding("ok", "root")


def own_programs(_: Settings) -> Finding:
    return Finding("ok", ", ".join(programs.own_program(name).name for name in ("aenv-edge", "aenv-envd")))


def system_programs(_: Settings) -> Finding:
    missing = []
    for name, package in _PROGRAMS.items():
        try:
            programs.system_program(name, package)
        except AenvError:
            missing.append(name)
    if missing:
        packages = " ".join(dict.fromkeys(_PROGRAMS[name] for name in missing))
        return Finding("failed", f"missing: {', '.join(missing)}", f"apt-get install {packages}")
    return Finding("ok", f"all {len(_PROGRAMS)} are there")


_PROGRAMS = {
    "qemu-img": "qemu-utils",
    "nft": "nftables",
    "mke2fs": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "depmod": "kmod",
    "tar": "tar",
    "cp": "coreutils",
    "zstd": "zstd",
    "xz": "xz-utils",
    "prlimit": "util-linux",
}


def qemu(settings: Settings) -> Finding:
    from aenv.vmm.qemu import QemuDriver

    quick = msgspec.structs.replace(settings.vmm, accelerator="tcg")  # what there is, is a check of its own
    driver = asyncio.run(QemuDriver.open(quick, settings.home))
    return Finding("ok", f"QEMU {driver.version}")


def acceleration(settings: Settings) -> Finding:
    from aenv.vmm import probe

    # The outcome is kept in the home, but making one is not for a check.
    with tempfile.TemporaryDirectory() as scratch:
        found = probe.choose(settings.vmm.accelerator, settings.home if settings.home.is_dir() else Path(scratch))
    if found.kind == "tcg" and settings.vmm.accelerator != "tcg":
        return Finding("warning", f"software emulation: {found.reason}", found.remedy)
    return Finding("ok", f"{found.kind}: {found.reason}")


def fuse(_: Settings) -> Finding:
    """Layered images are shown as files through it."""
    return _device(Path("/dev/fuse"), "modprobe fuse; in a container pass --device /dev/fuse", "warning")


def tun(_: Settings) -> Finding:
    return _device(Path("/dev/net/tun"), "modprobe tun; in a container pass --device /dev/net/tun", "failed")


def network(settings: Settings) -> list[Finding]:
    from aenv.network import diagnose

    found = diagnose(settings)
    if not found:
        return [Finding("ok", f"nothing stands in the way of {settings.network.subnet}")]
    return [Finding("failed" if each.fatal else "warning", each.message, each.remedy) for each in found]


def forwarding(_: Settings) -> Finding:
    switch = Path("/proc/sys/net/ipv4/ip_forward")
    if switch.read_text().strip() == "1":
        return Finding("ok", "on")
    if os.access(switch, os.W_OK) and not os.statvfs(switch).f_flag & os.ST_RDONLY:
        return Finding("ok", "off; `aenv serve` switches it on")
    return Finding("failed", "off, and cannot be switched on from here", "sysctl -w net.ipv4.ip_forward=1")


def disk_space(settings: Settings) -> Finding:
    place = settings.home
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    detail = f"{free / GIB:.1f} GiB free at {place}"
    if free < 2 * GIB:
        return Finding("failed", detail, "free at least 2 GiB, or choose another --home")
    if free < 10 * GIB:
        return Finding("warning", detail, "sandboxes write to disk: 10 GiB and more are comfortable")
    return Finding("ok", detail)


def memory(settings: Settings) -> Finding:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = _group_limit()
    available = min(available, group) if group is not None else available
    fit = available // ((settings.machine.memory + 128) << 20)
    detail = f"{available / GIB:.1f} GiB available, about {fit} sandboxes of {settings.machine.memory} MiB"
    if fit < 1:
        return Finding("failed", detail, "free memory, or make sandboxes smaller: [machine] memory")
    return Finding("ok" if fit >= 4 else "warning", detail, None if fit >= 4 else "more memory fits more sandboxes")


def open_files(_: Settings) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"soft {_limit(soft)}, hard {_limit(hard)}"
    if hard != resource.RLIM_INFINITY and hard < 4096:
        return Finding("warning", detail, "raise it: LimitNOFILE= of the service, or limits.conf")
    return Finding("ok", detail)


def guest_kernel(settings: Settings) -> Finding:
    from aenv.vmm.kernel import load_kernel

    directory = settings.home / "kernels"
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if not path.name.startswith(".") and path.is_dir():
            found.append(load_kernel(settings, path.name).version)
    if not found:
        return Finding("warning", "none yet", "`aenv setup` builds it, as does the first `aenv serve`")
    return Finding("ok", ", ".join(found))


def base_template(settings: Settings) -> Finding:
    from aenv.errors import NotFound
    from aenv.templates.store import TemplateStore

    try:
        template = TemplateStore(settings).get("base")
    except NotFound:
        return Finding("warning", "none yet", "`aenv setup` builds it, as does the first `aenv serve`")
    return Finding("ok", f"{template.template_id}, made {template.created_at:%Y-%m-%d}")


def server(settings: Settings) -> Finding:
    """Either the port is free, or a server of ours answers on it."""
    from aenv.client.credentials import local_address

    host, port = local_address(settings.listen)
    try:
        with socket.create_connection((host, port), timeout=2) as connection:
            connection.settimeout(2)
            connection.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = connection.recv(256)
    except ConnectionRefusedError:
        return _free(settings.listen)
    except OSError as error:
        return Finding("failed", f"{settings.listen}: {error.strerror or error}", "choose another --listen")
    status = answer.split(b" ", 2)[1:2]
    if status == [b"204"]:
        return Finding("ok", f"a server answers at {settings.listen}")
    if status == [b"503"]:
        return Finding("warning", f"the edge answers at {settings.listen}, the server behind it does not", "aenv serve")
    return Finding("failed", f"another program listens at {settings.listen}", "stop it, or choose another --listen")


def _free(listen: str) -> Finding:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            return Finding("failed", f"cannot listen at {listen}: {error.strerror}", "choose another --listen")
    return Finding("ok", f"no server runs, {listen} is free")


def clock(_: Settings) -> Finding:
    """Guests take their time from this machine, and certificates depend on it."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() < _EARLIEST:
        return Finding("failed", f"{shown} is in the past", "set the clock: timedatectl set-ntp true")
    if _clock_status() & _UNSYNCHRONISED:
        return Finding("warning", f"{shown}, not synchronised", "timedatectl set-ntp true")
    return Finding("ok", shown)


def _clock_status() -> int:
    """The status bits of the kernel's clock, see adjtimex(2)."""
    buffer = (ctypes.c_long * 64)()  # struct timex: modes (int), offset, freq, maxerror, esterror, status (int), …
    if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(buffer[5]) & 0xFFFF_FFFF


def _device(path: Path, remedy: str, otherwise: Status) -> Finding:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        missing = error.errno == errno.ENOENT
        return Finding(
            otherwise, f"{path} {'is missing' if missing else f'cannot be opened: {error.strerror}'}", remedy
        )
    return Finding("ok", str(path))


def _group_limit() -> int | None:
    """Bytes that the control group of this process may still use."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


CHECKS: list[tuple[str, Check]] = [
    ("kernel", kernel),
    ("privileges", privileges),
    ("AENV programs", own_programs),
    ("system programs", system_programs),
    ("QEMU", qemu),
    ("acceleration", acceleration),
    ("/dev/fuse", fuse),
    ("/dev/net/tun", tun),
    ("IPv4 forwarding", forwarding),
    ("network", network),
    ("disk space", disk_space),
    ("memory", memory),
    ("open files", open_files),
    ("guest kernel", guest_kernel),
    ("template base", base_template),
    ("server", server),
    ("clock", clock),
]
