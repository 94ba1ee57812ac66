"""What only QEMU does: how it fails, hangs, and which combinations are refused."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from aenv import programs
from aenv.config import VmmSettings
from aenv.errors import SetupError, VmmFailed
from aenv.vmm import qemu, qemu_machine, qmp
from aenv.vmm.injection import Injection, Refused
from aenv.vmm.interface import Disk
from aenv.vmm.probe import Acceleration
from aenv.vmm.qemu import QemuDriver
from aenv.vmm.qmp import Qmp
from tests.conformance import capture
from tests.conformance.guests import Guest, restore
from tests.conformance.machines import SHAPE, Lab, line

TCG = Acceleration("tcg", "for a test")


def instead_of_qemu(lab: Lab, script: str) -> Lab:
    """A laboratory whose QEMU is a shell script."""
    program = lab.root / "qemu"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Lab(QemuDriver(program, "7.2.0", TCG, None, 2_600_000), lab.kernel, lab.root)


async def test_a_qemu_that_dies_is_quoted(lab: Lab) -> None:
    dying = instead_of_qemu(lab, "echo 'qemu: the disk is on fire' >&2; exit 1")
    with pytest.raises(VmmFailed, match="QEMU did not start conformance: qemu: the disk is on fire"):
        await dying.driver.boot(dying.config())
    assert lab.leftovers() == []


async def test_a_qemu_that_dies_in_silence(lab: Lab) -> None:
    dying = instead_of_qemu(lab, "exit 1")
    with pytest.raises(VmmFailed, match=r"QEMU did not start conformance: .*monitor"):
        await dying.driver.boot(dying.config())
    assert lab.leftovers() == []


async def test_a_qemu_that_says_too_much(lab: Lab) -> None:
    dying = instead_of_qemu(lab, "yes 'qemu: help' | head -c 10000000 >&2; exit 1")
    with pytest.raises(VmmFailed, match="qemu: help") as caught:
        await dying.driver.boot(dying.config())
    assert len(str(caught.value)) < 10_000


async def test_a_qemu_that_never_answers(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qemu, "GREETING_TIMEOUT", 0.3)
    hanging = instead_of_qemu(lab, "exec sleep 100")
    with pytest.raises(VmmFailed, match=r"did not greet within 0\.3 s"):
        await hanging.driver.boot(hanging.config())
    assert lab.leftovers() == []


async def test_a_program_that_cannot_be_executed(lab: Lab) -> None:
    driver = QemuDriver(lab.root / "nothing", "7.2.0", TCG, None, 2_600_000)
    with pytest.raises(VmmFailed, match="nothing"):
        await driver.boot(lab.config())
    assert lab.leftovers() == []


async def test_qemus_own_refusal_is_quoted(lab: Lab) -> None:
    """An image with a header that we understand and tables that QEMU does not."""
    image = lab.root / "image"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(image), "1M"], check=True)
    with image.open("r+b") as file:
        file.seek(40)
        file.write(((1 << 40) + 1).to_bytes(8))  # the offset of the first table
    with pytest.raises(VmmFailed, match=r"QEMU did not start conformance: .*L1"):
        await lab.driver.boot(lab.config(disks=(Disk(image, "qcow2", False),)))
    assert lab.leftovers() == []


async def test_an_image_that_is_in_use_is_refused(lab: Lab) -> None:
    disk = lab.disk("disk", 1 << 20)
    await lab.boot(disks=(disk,))
    with pytest.raises(VmmFailed, match="lock"):
        await lab.driver.boot(lab.config(disks=(disk,)))


async def test_a_read_only_image_may_be_shared(lab: Lab) -> None:
    disk = lab.disk("disk", 1 << 20, read_only=True)
    first, second = await lab.boot(disks=(disk,)), await lab.boot(disks=(disk,))
    assert await first.status() == await second.status() == "running"


async def test_commands_to_a_qemu_that_hangs_end(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qmp, "COMMAND_TIMEOUT", 0.3)
    machine = await lab.boot("count")
    os.kill(machine.record.pid, signal.SIGSTOP)
    with pytest.raises(VmmFailed, match=r"stop: QEMU did not answer within 0\.3 s"):
        await machine.pause()
    os.kill(machine.record.pid, signal.SIGCONT)
    # It was late, not lost; the connection is still good for more.
    await machine.resume()
    await line(machine, r"guest: count \d+\r")
    assert await machine.status() == "running"


async def test_a_lost_monitor_is_connected_again(lab: Lab) -> None:
    machine = await lab.boot()
    assert isinstance(machine, qemu_machine.QemuMachine)
    first = await machine.connect(5)
    await first.close()
    assert await machine.status() == "running"
    assert await machine.connect(5) is not first


async def test_old_qemu_and_new_kernel_do_not_go_together(lab: Lab) -> None:
    kernel = msgspec.structs.replace(lab.kernel, version="6.12.95+deb12-cloud-amd64")
    for version, kind, refused in (
        ("7.2.22", "tcg", True),
        ("9.2.0", "tcg", True),
        ("7.2.22", "kvm-intel", False),
        ("10.0.2", "tcg", False),
    ):
        driver = QemuDriver(lab.root / "nothing", version, Acceleration(kind, ""), None, 1)  # type: ignore[arg-type]
        with pytest.raises(VmmFailed) as caught:
            await driver.boot(lab.config(kernel=kernel))
        assert ("cannot run the kernel 6.12" in str(caught.value)) == refused
    odd = msgspec.structs.replace(lab.kernel, version="linux")
    with pytest.raises(VmmFailed, match="'linux' is not a version"):
        await lab.driver.boot(lab.config(kernel=odd))


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("echo QEMU emulator version 6.2.0", "QEMU 6.2.0 is too old"),
        ("echo something else", "does not tell its version"),
        ("exit 1", "does not tell its version"),
        (None, "cannot run"),
    ],
)
async def test_programs_that_are_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, cause: str
) -> None:
    program = tmp_path / "qemu"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755 if script is not None else 0o644)
    monkeypatch.setattr(qemu, "system_program", lambda name, package: program)
    with pytest.raises(SetupError, match=cause):
        await QemuDriver.open(VmmSettings(accelerator="tcg"), tmp_path)


async def test_a_driver_knows_its_qemu(tmp_path: Path) -> None:
    driver = await QemuDriver.open(VmmSettings(accelerator="tcg"), tmp_path)
    assert driver.program == programs.system_program("qemu-system-x86_64", "qemu-system-x86")
    assert driver.version_numbers >= qemu.OLDEST
    assert driver.acceleration.kind == "tcg"


async def test_states_of_another_build_of_the_same_version_are_refused(lab: Lab) -> None:
    """Packages are upgraded under a running server, and what is saved is of the build that ran."""
    assert isinstance(lab.driver, QemuDriver)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # its account has to execute it
        program = Path(directory) / "qemu"
        program.symlink_to(lab.driver.program)
        await upgrade(lab, program)


async def upgrade(lab: Lab, program: Path) -> None:
    driver = await QemuDriver.open(VmmSettings(), lab.root)
    driver.program = program
    old = Lab(driver, lab.kernel, lab.root)
    guest = await Guest.boot(old)
    snapshot = await guest.pause_and_snapshot()
    assert snapshot.saved.build == hashlib.sha256(program.read_bytes()).hexdigest()
    assert (await (await restore(old, snapshot)).sum()).startswith("memory=")
    replaced = program.with_name("new")
    replaced.write_text(f'#!/bin/sh\nexec {program.resolve()} "$@"\n')
    replaced.chmod(0o755)
    replaced.replace(program)
    with pytest.raises(VmmFailed, match="it needs the very qemu"):
        await restore(old, snapshot)
    again = await guest.snapshot()
    assert again.saved.build == snapshot.saved.build
    await old.close()


async def test_without_ptrace_memory_is_copied(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guest = await Guest.boot(lab)
    expected = await guest.contents()
    snapshot = await guest.pause_and_snapshot()
    await guest.machine.kill()
    before = capture.image_digest(snapshot.memory)
    monkeypatch.setattr(Injection, "__enter__", mock.Mock(side_effect=Refused("for a test")))
    siblings = [await restore(lab, snapshot) for _ in range(2)]
    assert "ptrace is not allowed (for a test)" in caplog.text
    await siblings[1].ask("take 40")
    await siblings[1].ask("fill 9 1 4")
    assert await siblings[0].contents() == expected != await siblings[1].contents()
    assert capture.image_digest(snapshot.memory) == before
    # It can be saved like any other.
    again = await siblings[0].pause_and_snapshot()
    assert again.captured < 8 << 20
    assert await (await restore(lab, again)).contents() == expected


async def test_a_prepared_qemu_that_hangs_is_given_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    guest = await Guest.boot(lab)
    snapshot = await guest.pause_and_snapshot()
    prepared = await lab.prepare(snapshot.saved.machine)
    monkeypatch.setattr(qmp, "COMMAND_TIMEOUT", 0.3)
    os.kill(prepared.record.pid, signal.SIGSTOP)
    with pytest.raises(VmmFailed, match=r"cannot restore: getfd: QEMU did not answer within 0\.3 s"):
        await restore(lab, snapshot, prepared=prepared)
    assert not Path(f"/proc/{prepared.record.pid}").exists()


@pytest.mark.parametrize("answer", ["", "(ram) is 0x1000", "(ram) is 0xffffffffffffffff", "unknown command"])
async def test_memory_is_not_where_qemu_claims(lab: Lab, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """A QEMU in a guest's hands may say anything; what it says is looked up in the kernel's map of it."""
    machine = await lab.boot()
    execute = Qmp.execute

    async def lie(self: Qmp, command: str, **arguments: Any) -> Any:
        return answer if command == "human-monitor-command" else await execute(self, command, **arguments)

    monkeypatch.setattr(Qmp, "execute", lie)
    with pytest.raises(VmmFailed, match=r"does not tell where|there is no guest memory"):
        await machine.memory()


async def test_two_processors(lab: Lab) -> None:
    machine = await lab.boot("count", shape=msgspec.structs.replace(SHAPE, vcpus=2))
    await line(machine, "guest: count 1\r")
    qmp_connection = await machine.connect(5)  # type: ignore[attr-defined]
    assert len(await qmp_connection.execute("query-cpus-fast")) == 2


async def test_many_machines_start_at_once(lab: Lab) -> None:
    machines = await asyncio.gather(*(lab.boot() for _ in range(8)))
    assert len({it.record.pid for it in machines}) == 8
    await asyncio.gather(*(it.kill() for it in machines))
    assert lab.leftovers() == []
