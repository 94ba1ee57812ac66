"""What every VMM driver promises (``aenv.vmm.interface``), shown on real guests."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from aenv.config import VmmSettings
from aenv.errors import VmmFailed
from aenv.vmm.accounts import COUNT
from aenv.vmm.interface import BootConfig, Disk, Machine
from tests.conformance.machines import MAC, SHAPE, Lab, elsewhere, eventually, last, line, open_files

MIB = 1 << 20


def proc(machine: Machine, name: str) -> str:
    return Path(f"/proc/{machine.record.pid}/{name}").read_text()


def field(machine: Machine, name: str) -> list[str]:
    return next(it for it in proc(machine, "status").splitlines() if it.startswith(f"{name}:")).split()[1:]


# --- life


async def test_a_guest_boots_and_speaks(lab: Lab) -> None:
    machine = await lab.boot()
    assert await machine.status() == "running"
    await line(machine, "guest: ready")
    assert machine.record.driver == lab.driver.name
    assert machine.record.version[0].isdigit()


async def test_pause_stops_the_guest_and_resume_continues_it(lab: Lab) -> None:
    machine = await lab.boot("count")
    await line(machine, r"guest: count [3-9]\r")
    await machine.pause()
    await machine.pause()
    assert await machine.status() == "paused"
    before = machine.serial_tail()
    ticks = proc(machine, "stat").split()[13:15]
    await asyncio.sleep(0.5)  # an observation: 25 counts' worth of time
    assert machine.serial_tail() == before
    assert sum(map(int, proc(machine, "stat").split()[13:15])) - sum(map(int, ticks)) <= 5
    counted = last(machine, r"guest: count (\d+)\r")
    assert counted is not None
    await machine.resume()
    await machine.resume()
    assert await machine.status() == "running"
    await line(machine, f"guest: count {int(counted[1]) + 1}\r")


async def test_kill_leaves_nothing(lab: Lab) -> None:
    machine = await lab.boot()
    pid = machine.record.pid
    await machine.kill()
    assert not Path(f"/proc/{pid}").exists()
    assert lab.leftovers() == []
    assert list(machine.record.directory.iterdir()) == []
    assert (await machine.wait()).code == -signal.SIGKILL
    await machine.kill()
    assert await machine.status() == "gone"
    for action in (machine.pause, machine.resume):
        with pytest.raises(VmmFailed, match="ended"):
            await action()


async def test_a_directory_may_have_a_long_name(lab: Lab) -> None:
    directory = lab.root / ("d" * 200) / ("e" * 200)
    directory.mkdir(parents=True)
    machine = await lab.boot(directory=directory)
    assert await machine.status() == "running"
    await machine.kill()
    assert list(directory.iterdir()) == []


async def test_kill_works_on_a_vmm_that_hangs(lab: Lab) -> None:
    machine = await lab.boot()
    os.kill(machine.record.pid, signal.SIGSTOP)
    asking = asyncio.create_task(machine.status())
    await asyncio.sleep(0)
    await asyncio.wait_for(machine.kill(), 5)
    assert await asking == "gone"


async def test_a_violent_death_is_noticed_at_once_by_everybody(lab: Lab) -> None:
    machine = await lab.boot()
    waiting = [asyncio.create_task(machine.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    os.kill(machine.record.pid, signal.SIGKILL)
    exits = await asyncio.wait_for(asyncio.gather(*waiting), 1)
    assert [it.code for it in exits] == [-signal.SIGKILL] * 3
    assert lab.leftovers() == []


async def test_wait_can_be_given_up(lab: Lab) -> None:
    machine = await lab.boot()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(machine.wait(), 0.05)
    assert await machine.status() == "running"


async def test_a_guest_that_powers_off_ends_its_vmm(lab: Lab) -> None:
    machine = await lab.boot("poweroff")
    assert (await asyncio.wait_for(machine.wait(), 60)).code == 0
    assert "guest: ready" in machine.serial_tail()
    assert lab.leftovers() == []


async def test_a_guest_that_panics_ends_its_vmm_and_its_last_words_stay(lab: Lab) -> None:
    machine = await lab.boot("panic")
    await asyncio.wait_for(machine.wait(), 60)
    assert "Kernel panic" in machine.serial_tail()


async def test_shutdown_waits_for_the_guest(lab: Lab) -> None:
    machine = await lab.boot("farewell")
    await line(machine, "guest: ready")
    await machine.pause()  # which must not keep it from shutting down
    await machine.shutdown(50)
    assert (await machine.wait()).code == 0


async def test_shutdown_kills_a_guest_that_does_not_listen(lab: Lab) -> None:
    machine = await lab.boot()
    await line(machine, "guest: ready")
    begin = time.monotonic()
    await machine.shutdown(0.5)
    assert 0.5 <= time.monotonic() - begin < 5
    assert (await machine.wait()).code == -signal.SIGKILL
    await machine.shutdown(0.5)


async def test_machines_are_independent(lab: Lab) -> None:
    first, second = await asyncio.gather(lab.boot("count"), lab.boot("count"))
    await first.pause()
    await line(second, "guest: count 1\r")
    await first.kill()
    assert await second.status() == "running"


# --- the guest's hardware


async def test_the_guest_has_what_it_was_given(lab: Lab) -> None:
    backing = lab.disk("backing", 5 * MIB, b"backing")
    overlay = lab.root / "overlay"
    created = await asyncio.create_subprocess_exec(
        *("qemu-img", "create", "-q", "-f", "qcow2", "-b", str(backing.path), "-F", "raw", str(overlay), "7M")
    )
    assert await created.wait() == 0
    disks = (
        lab.disk("first", 3 * MIB, b"first"),
        lab.disk("second", 4 * MIB, b"second", read_only=True),
        Disk(overlay, "qcow2", False),
    )
    tap = open_tap()
    try:
        machine = await lab.boot("devices", disks=disks, tap_fd=tap)
    finally:
        os.close(tap)
    found = await line(machine, r"guest: devices (.*) end")
    assert found[1].split() == [
        f"vda={3 * MIB // 512}:rw:first",
        f"vdb={4 * MIB // 512}:ro:second",
        f"vdc={7 * MIB // 512}:rw:backing",
        f"eth0={MAC}",
        "rng=virtio_rng.0",
    ]


# --- the console


async def flooded(machine: Machine, beyond: int) -> int:
    """Wait until the guest has printed its line number ``beyond``."""

    def look() -> int | None:
        found = last(machine, r"guest: flood (\d+) ")
        return int(found[1]) if found and int(found[1]) >= beyond else None

    return await eventually(look, machine, 120)


async def test_a_flood_of_output_is_bounded_and_its_end_is_kept(lab: Lab) -> None:
    machine = await lab.boot("flood")
    # 10,000 lines of more than 200 bytes are twice as much as may be kept.
    await flooded(machine, 10_000)
    tail = machine.serial_tail(64 << 10)
    assert len(tail) >= 60 << 10
    numbers = [int(it.split()[2]) for it in tail.splitlines()[1:-1] if it.startswith("guest: flood")]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert kept(machine) <= 2 * MIB


async def test_the_console_is_still_bounded_and_alive_after_nobody_looked_after_it(lab: Lab, cache: Path) -> None:
    """The control plane dies, the guest goes on printing until the bound is reached, and a new one comes."""
    record, kill = await elsewhere(lab, lab.config("flood"), cache)
    await kill()

    async def grown() -> None:
        seen = -1
        while (size := position(record.pid)) != seen or size < 512 << 10:
            seen = size
            await asyncio.sleep(0.3)

    await asyncio.wait_for(grown(), 120)
    machine = await lab.driver.adopt(record)
    assert machine is not None
    lab.keep(machine)
    assert kept(machine) <= 2 * MIB
    found = last(machine, r"guest: flood (\d+) ")
    assert found is not None
    await flooded(machine, int(found[1]) + 1000)


async def test_serial_tail_limits_and_decodes(lab: Lab) -> None:
    machine = await lab.boot()
    await line(machine, "guest: ready")
    assert machine.serial_tail(0) == ""
    assert len(machine.serial_tail(5)) == 5
    assert machine.serial_tail(7).strip() == "ready"


def kept(machine: Machine) -> int:
    """Bytes that the output of a machine occupies, in files of its directory and in memory."""
    files = sum(it.stat().st_size for it in machine.record.directory.rglob("*") if it.is_file())
    return files + sum(Path(f"/proc/{machine.record.pid}/fd/{number}").stat().st_size for number in (1, 2))


def position(pid: int) -> int:
    text = Path(f"/proc/{pid}/fdinfo/1").read_text()
    return int(text.split()[1])


# --- adoption


async def test_a_machine_outlives_its_control_plane(lab: Lab, cache: Path) -> None:
    record, kill = await elsewhere(lab, lab.config("count"), cache)
    await kill()
    machine = await lab.driver.adopt(record)
    assert machine is not None
    lab.keep(machine)
    assert machine.record == record
    assert await machine.status() == "running"
    before = int((await line(machine, r"guest: count (\d+)\r"))[1])
    await machine.pause()
    assert await machine.status() == "paused"
    await machine.resume()
    await line(machine, f"guest: count {before + 5}\r")
    await machine.kill()
    # Somebody else is its parent now, and got its exit status.
    assert (await machine.wait()).code is None
    await eventually(lambda: None if Path(f"/proc/{record.pid}").exists() else True, machine, 10)


async def test_close_lets_go_and_adopt_takes_over(lab: Lab) -> None:
    first = await lab.driver.boot(lab.config("count"))
    waiting = asyncio.create_task(first.wait())
    await asyncio.sleep(0)
    await first.close()
    await asyncio.wait([waiting], timeout=5)
    assert waiting.cancelled()
    second = await lab.driver.adopt(first.record)
    assert second is not None
    lab.keep(second)
    await line(second, "guest: count 1\r")
    await second.kill()
    assert (await second.wait()).code == -signal.SIGKILL


async def test_adopt_finds_nothing_of_a_machine_that_is_gone(lab: Lab) -> None:
    machine = await lab.boot()
    other_boot = msgspec.structs.replace(machine.record, boot_id="00000000-0000-0000-0000-000000000000")
    assert await lab.driver.adopt(other_boot) is None
    earlier = msgspec.structs.replace(machine.record, start_time=machine.record.start_time - 1)
    assert await lab.driver.adopt(earlier) is None
    assert await machine.status() == "running", "the process that has the pid now is none of its business"
    await machine.kill()
    assert await lab.driver.adopt(machine.record) is None


async def test_adopt_finds_nothing_of_a_machine_that_died_unseen(lab: Lab) -> None:
    machine = await lab.driver.boot(lab.config())
    await machine.close()
    pidfd = os.pidfd_open(machine.record.pid)
    os.kill(machine.record.pid, signal.SIGKILL)
    assert select.select([pidfd], [], [], 5)[0] == [pidfd]
    os.close(pidfd)
    assert await lab.driver.adopt(machine.record) is None
    assert not Path(f"/proc/{machine.record.pid}").exists(), "our own child was not reaped"
    assert lab.leftovers() == []


# --- boots that fail


def missing_kernel(lab: Lab) -> tuple[BootConfig, str]:
    kernel = msgspec.structs.replace(lab.kernel, bzimage=lab.root / "nowhere")
    return lab.config(kernel=kernel), "nowhere"


def garbage_kernel(lab: Lab) -> tuple[BootConfig, str]:
    garbage = lab.disk("garbage", MIB).path
    return lab.config(kernel=msgspec.structs.replace(lab.kernel, bzimage=garbage, vmlinux=garbage)), "garbage"


def missing_initramfs(lab: Lab) -> tuple[BootConfig, str]:
    return lab.config(kernel=msgspec.structs.replace(lab.kernel, initramfs=lab.root / "nowhere")), "nowhere"


def missing_disk(lab: Lab) -> tuple[BootConfig, str]:
    return lab.config(disks=(Disk(lab.root / "nowhere", "raw", False),)), "nowhere"


def directory_as_disk(lab: Lab) -> tuple[BootConfig, str]:
    return lab.config(disks=(Disk(lab.root, "raw", True),)), "neither a file nor a block device"


def pipe_as_disk(lab: Lab) -> tuple[BootConfig, str]:
    os.mkfifo(lab.root / "pipe")
    return lab.config(disks=(Disk(lab.root / "pipe", "raw", True),)), "neither a file nor a block device"


def missing_namespace(lab: Lab) -> tuple[BootConfig, str]:
    return lab.config(netns=lab.root / "nowhere"), "nowhere"


def file_as_namespace(lab: Lab) -> tuple[BootConfig, str]:
    return lab.config(netns=lab.disk("file", 1).path), "file"


def missing_directory(lab: Lab) -> tuple[BootConfig, str]:
    return lab.config(directory=lab.root / "nowhere"), "nowhere"


def no_memory(lab: Lab) -> tuple[BootConfig, str]:
    return lab.config(shape=msgspec.structs.replace(SHAPE, memory=0)), "0 MiB"


def strange_name(lab: Lab) -> tuple[BootConfig, str]:
    return lab.config(name="a,b"), "a,b"


def strange_mac(lab: Lab) -> tuple[BootConfig, str]:
    return lab.config(mac="02:fc", tap_fd=0), "02:fc"


def endless_arguments(lab: Lab) -> tuple[BootConfig, str]:
    return lab.config(arguments=("x" * 3000,)), "command line"


def arguments_of_two_lines(lab: Lab) -> tuple[BootConfig, str]:
    return lab.config(arguments=("a\nb",)), "control characters"


@pytest.mark.parametrize(
    "make",
    [
        missing_kernel,
        garbage_kernel,
        missing_initramfs,
        missing_disk,
        directory_as_disk,
        pipe_as_disk,
        missing_namespace,
        file_as_namespace,
        missing_directory,
        no_memory,
        strange_name,
        strange_mac,
        endless_arguments,
        arguments_of_two_lines,
    ],
)
async def test_a_boot_that_fails_says_why_and_leaves_nothing(
    lab: Lab, make: Callable[[Lab], tuple[BootConfig, str]]
) -> None:
    config, cause = make(lab)
    before = open_files()
    with pytest.raises(VmmFailed) as caught:
        await lab.driver.boot(config)
    assert cause in str(caught.value)
    assert lab.leftovers() == []
    assert open_files() == before


async def test_a_boot_that_is_cancelled_leaves_nothing(lab: Lab) -> None:
    """At whatever moment: every 4 ms of the first 120, by the end of which a boot is usually over."""
    before = open_files()
    for delay in range(0, 120, 4):
        booting = asyncio.create_task(lab.driver.boot(lab.config()))
        await asyncio.sleep(delay / 1000)
        if booting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await booting
        else:
            machine = await booting
            await machine.kill()
            await machine.close()
        assert lab.leftovers() == [], f"after {delay} ms"
        assert open_files() == before, f"after {delay} ms"


# --- confinement


async def test_the_vmm_is_confined(lab: Lab) -> None:
    machine = await lab.boot()
    first = int(VmmSettings().user)
    for ids in (field(machine, "Uid"), field(machine, "Gid")):
        assert len(ids) == 4
        assert len(set(ids)) == 1
        assert first <= int(ids[0]) < first + COUNT
    kvm = str(Path("/dev/kvm").stat().st_gid) if machine.record.accelerator != "tcg" else ""
    assert set(field(machine, "Groups")) <= {kvm}
    assert int(field(machine, "CapEff")[0], 16) == int(field(machine, "CapPrm")[0], 16) == 0
    assert field(machine, "NoNewPrivs") == ["1"]
    assert field(machine, "Seccomp") == ["2"], "a filter"
    for task in Path(f"/proc/{machine.record.pid}/task").iterdir():
        assert "Seccomp:\t2" in (task / "status").read_text()
    limits = proc(machine, "limits")
    assert next(it for it in limits.splitlines() if it.startswith("Max core file size")).split()[4:6] == ["0", "0"]
    assert int(next(it for it in limits.splitlines() if it.startswith("Max file size")).split()[3]) <= 1 << 30
    assert int(proc(machine, "oom_score_adj")) >= 300
    assert os.getsid(machine.record.pid) == machine.record.pid


async def test_no_two_vmms_have_the_same_account(lab: Lab) -> None:
    machines = await asyncio.gather(*(lab.boot() for _ in range(4)))
    machines.append(await lab.boot())
    assert len({field(machine, "Uid")[0] for machine in machines}) == 5


async def test_the_vmm_has_no_files_but_its_own(lab: Lab) -> None:
    disk = lab.disk("disk", MIB)
    secret = os.open(lab.disk("secret", 1).path, os.O_RDONLY)
    os.set_inheritable(secret, True)
    reading, writing = os.pipe()
    try:
        machine = await lab.boot(disks=(disk,))
    finally:
        for fd in (secret, reading, writing):
            os.close(fd)
    links = {str(it.readlink()) for it in Path(f"/proc/{machine.record.pid}/fd").iterdir()}
    files = {it for it in links if it.startswith("/") and not it.startswith("/memfd:")}
    kernel = {str(lab.kernel.bzimage), str(lab.kernel.vmlinux), str(lab.kernel.initramfs)}
    assert files - kernel <= {"/dev/null", "/dev/kvm", str(disk.path)}
    assert not any(it.startswith("pipe:") for it in links)


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "netns"
    path.touch()
    subprocess.run(["unshare", f"--net={path}", "true"], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


async def test_the_vmm_is_in_its_network_namespace_and_we_are_not(lab: Lab, namespace: Path) -> None:
    before = Path("/proc/self/ns/net").stat().st_ino
    machine = await lab.boot(netns=namespace)
    assert Path(f"/proc/{machine.record.pid}/ns/net").stat().st_ino == namespace.stat().st_ino != before
    for thread in threading.enumerate():
        assert Path(f"/proc/self/task/{thread.native_id}/ns/net").stat().st_ino == before
    assert int(field(machine, "Uid")[0]) >= int(VmmSettings().user)


def open_tap() -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    tap, no_pi, vnet_hdr = 0x0002, 0x1000, 0x4000
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", b"aenvtest%d", tap | no_pi | vnet_hdr))
    return fd
