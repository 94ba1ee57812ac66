"""Network slots on the real kernel: what flows, what does not, and that nothing is left."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from aenv.config import NetworkSettings, Settings
from aenv.errors import Conflict, OperationFailed, SetupError, Unavailable
from aenv.network import Network, Slot, addresses, diagnose, host, links, namespace, rtnetlink, rules
from aenv.network.nft import Nftables
from aenv.network.rtnetlink import Rtnetlink
from tests.integration import network_lab
from tests.integration.network_lab import ECHO, HOST, OUTSIDE, PRIVATE, Lab, ask, command, guest, traces, within

FAST = 0.4
"""Seconds after which a packet that was dropped on purpose counts as dropped; others arrive in well under 10 ms."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.close()


@pytest.fixture
def settings(lab: Lab, tmp_path: Path) -> Iterator[Settings]:
    yield Settings(home=tmp_path / "home", runtime=tmp_path / "run")
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        if line.split()[4].startswith(str(tmp_path)):
            namespace.umount(Path(line.split()[4]))  # of a test that failed


@pytest.fixture
async def network(settings: Settings) -> AsyncIterator[Network]:
    """An open network. The test destroys its slots itself, and then the machine is as it was."""
    settings.run.mkdir()
    before = traces(settings.run)
    network = Network(settings)
    await network.open()
    yield network
    await network.close()
    leftover = await reap(settings)
    assert (leftover, traces(settings.run)) == ([], before)


async def reap(settings: Settings) -> list[int]:
    """What a new server that owns nothing finds of its home."""
    later = Network(settings)
    await later.open()
    try:
        return await later.reap([])
    finally:
        await later.close()


@pytest.fixture
async def slot(network: Network) -> AsyncIterator[Slot]:
    slot = await network.create()
    yield slot
    await network.destroy(slot)


def inner(slot: Slot) -> int:
    return os.open(slot.netns, os.O_RDONLY)


def in_slot(slot: Slot, function: Callable[[], str]) -> str:
    fd = inner(slot)
    try:
        return within(fd, function)
    finally:
        os.close(fd)


# What a guest reaches.


async def test_a_guest_reaches_the_outside_under_the_address_of_the_machine(network: Network, slot: Slot) -> None:
    with guest(network, slot) as vm:
        assert vm.ask(OUTSIDE) == f"{HOST} 0"


async def test_large_packets_find_the_smallest_mtu_on_their_way(network: Network, slot: Slot) -> None:
    wan = network_lab.number("wan0")
    with guest(network, slot) as vm, Rtnetlink() as machine:
        machine.run(rtnetlink.set_hardware(wan, "02:00:00:00:00:01", 1280))
        try:
            assert vm.ask(OUTSIDE, payload=bytes(300_000)) == f"{HOST} 300000"
        finally:
            machine.run(rtnetlink.set_hardware(wan, "02:00:00:00:00:01", 1500))


@pytest.mark.parametrize("address", PRIVATE)
async def test_private_ranges_are_refused_at_once(network: Network, slot: Slot, address: str) -> None:
    assert ask(address, ECHO).startswith(HOST)  # the machine itself does reach it
    with guest(network, slot) as vm, pytest.raises(OSError) as caught:
        vm.ask(address)
    assert caught.value.errno in (errno.EHOSTUNREACH, errno.EACCES)


async def test_a_name_server_in_a_private_range_answers_on_port_53_only(lab: Lab, tmp_path: Path) -> None:
    lab.serve(lab.outside, 53)
    network = Network(
        Settings(home=tmp_path, runtime=tmp_path / "run", network=NetworkSettings(dns=(PRIVATE[0],))),
    )
    await network.open()
    slot = await network.create()
    try:
        with guest(network, slot) as vm:
            assert vm.ask(PRIVATE[0], 53) == f"{HOST} 0"
            for address, port in ((PRIVATE[0], ECHO), (PRIVATE[1], 53)):
                with pytest.raises(OSError):
                    vm.ask(address, port)
    finally:
        await network.destroy(slot)
        await network.close()


async def test_the_machine_itself_is_out_of_reach(lab: Lab, network: Network, slot: Slot) -> None:
    lab.serve_here(9090)
    lab.serve(fd := inner(slot), 9090)
    os.close(fd)
    host_end = command("ip", "-4", "-br", "addr", "show", slot.host_link).split()[2].split("/")[0]
    assert within(lab.outside, lambda: ask(HOST, 9090)).startswith("198.51.100.2")
    with guest(network, slot) as vm:
        for address in (HOST, host_end, slot.gateway):
            with pytest.raises(OSError):
                vm.ask(address, 9090, timeout=FAST)
        # It is the host's table that says so: without it, the address on the outer link answers.
        command("nft", "flush table inet aenv")
        try:
            assert vm.ask(HOST, 9090).endswith(" 0")
        finally:
            command("nft", "-f", "-", stdin=rules.host_table())


async def test_a_port_that_others_publish_on_the_machine_is_out_of_reach(network: Network, slot: Slot) -> None:
    command(
        "nft",
        "table ip published { chain p { type nat hook prerouting priority dstnat;"
        f" ip daddr {HOST} tcp dport 8081 dnat to {OUTSIDE}:{ECHO}; }}; }}",
    )
    try:
        with guest(network, slot) as vm:
            with pytest.raises(TimeoutError):
                vm.ask(HOST, 8081, timeout=FAST)
            command("nft", "flush chain inet aenv prerouting")
            try:
                assert vm.ask(HOST, 8081) == f"{HOST} 0"
            finally:
                command("nft", "-f", "-", stdin=rules.host_table())
    finally:
        command("nft", "delete table ip published")


async def test_guests_do_not_reach_each_other_whatever_their_own_tables_say(
    lab: Lab, network: Network, slot: Slot
) -> None:
    other = await network.create()
    fd = inner(other)
    lab.serve(fd, 7000)
    target = in_slot(other, lambda: command("ip", "-4", "-br", "addr", "show", "uplink").split()[2].split("/")[0])
    within(fd, lambda: command("nft", "delete table inet aenv"))
    os.close(fd)
    with guest(network, slot) as vm:
        with pytest.raises(OSError) as caught:
            vm.ask(target, 7000)
        assert caught.value.errno in (errno.EHOSTUNREACH, errno.EACCES)
        in_slot(slot, lambda: command("nft", "flush set inet aenv denied"))
        with pytest.raises(TimeoutError):
            vm.ask(target, 7000, timeout=FAST)
        command("nft", "flush chain inet aenv forward; flush chain inet aenv prerouting")
        try:
            assert vm.ask(target, 7000).endswith(" 0")
        finally:
            command("nft", "-f", "-", stdin=rules.host_table())
    await network.destroy(other)


async def test_nobody_opens_a_connection_towards_a_guest_from_outside(lab: Lab, network: Network, slot: Slot) -> None:
    target = in_slot(slot, lambda: command("ip", "-4", "-br", "addr", "show", "uplink").split()[2].split("/")[0])
    lab.serve(fd := inner(slot), 7001)
    os.close(fd)

    def route() -> None:
        command("ip", "route", "replace", f"{target}/32", "via", HOST)

    within(lab.outside, route)
    with pytest.raises(TimeoutError):
        within(lab.outside, lambda: ask(target, 7001, timeout=FAST))
    in_slot(slot, lambda: command("nft", "flush ruleset"))
    with pytest.raises(TimeoutError):
        within(lab.outside, lambda: ask(target, 7001, timeout=FAST))
    command("nft", "flush chain inet aenv forward")
    try:
        assert within(lab.outside, lambda: ask(target, 7001)).startswith("198.51.100.2")
    finally:
        command("nft", "-f", "-", stdin=rules.host_table())


async def test_a_program_beside_the_guest_reaches_the_guest_only(network: Network, slot: Slot) -> None:
    """Such as a VMM that its guest has taken over."""
    with pytest.raises(OSError):
        in_slot(slot, lambda: ask(OUTSIDE, ECHO, timeout=FAST))
    in_slot(slot, lambda: command("nft", "flush ruleset"))
    # The way is there, only the rules close it.
    assert in_slot(slot, lambda: ask(OUTSIDE, ECHO)) == f"{HOST} 0"


async def test_pins_do_not_spread_into_other_mount_namespaces(lab: Lab, tmp_path: Path) -> None:
    command("mount", "--bind", str(tmp_path), str(tmp_path))
    command("mount", "--make-shared", str(tmp_path))
    network = Network(Settings(home=tmp_path / "home", runtime=tmp_path / "run"))
    try:
        await network.open()
        slot = await network.create()
        lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        optional = {fields[4]: fields[6 : fields.index("-")] for fields in lines}
        assert optional[str(tmp_path)][0].startswith("shared:")
        assert optional[str(slot.netns)] == []
        await network.destroy(slot)
        await network.close()
    finally:
        command("umount", "--lazy", str(tmp_path))


async def test_packets_under_a_false_source_go_nowhere(lab: Lab, network: Network, slot: Slot) -> None:
    receiver = within(lab.outside, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    receiver.bind((OUTSIDE, 5300))
    receiver.settimeout(5)

    def send(source: str, text: bytes) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.bind((source, 0))
            sender.sendto(text, (OUTSIDE, 5300))

    with receiver, guest(network, slot) as vm:
        vm.run(lambda: command("ip", "addr", "add", "198.51.100.77/32", "dev", "tap0"))
        vm.run(lambda: send("198.51.100.77", b"false"))
        vm.run(lambda: send(slot.guest_address, b"true"))
        assert receiver.recvfrom(100)[0] == b"true"


async def test_there_is_no_ipv6(network: Network, slot: Slot) -> None:
    with guest(network, slot):
        inside = in_slot(slot, lambda: command("ip", "-6", "addr"))
        assert inside == ""
        assert command("ip", "-6", "addr", "show", slot.host_link) == ""


async def test_a_guest_cannot_fill_the_flow_table_of_the_machine(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MAX_FLOWS", 20)
    network = Network(Settings(home=tmp_path, runtime=tmp_path / "run"))
    await network.open()
    slot = await network.create()

    def flood() -> int:
        sent = 0
        for port in range(20_000, 20_100):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.setsockopt(socket.SOL_IP, 11, 1)  # IP_RECVERR
                sender.connect((OUTSIDE, port))
                sender.send(b"x")
                sent += 1
        return sent

    try:
        with guest(network, slot) as vm:
            assert vm.run(flood) == 100
            with pytest.raises(OSError):
                vm.ask(OUTSIDE)
            flows = Path("/proc/thread-self/net/nf_conntrack").read_text()
            assert 1 <= sum(f"src={network._subnet.peer(slot.index)} " in line for line in flows.splitlines()) <= 20
    finally:
        await network.destroy(slot)
        await network.close()


async def test_a_rule_set_is_replaced_while_traffic_flows_and_cuts_what_it_forbids(
    network: Network, slot: Slot
) -> None:
    with guest(network, slot) as vm:
        flow = vm.run(lambda: socket.create_connection((OUTSIDE, ECHO), timeout=5))
        with flow:
            in_slot(slot, lambda: command("nft", "flush chain inet aenv allowance; add rule inet aenv allowance drop"))
            flow.settimeout(FAST)
            flow.sendall(b"x")
            flow.shutdown(socket.SHUT_WR)
            with pytest.raises(TimeoutError):
                flow.recv(10)
            in_slot(
                slot, lambda: command("nft", "flush chain inet aenv allowance; add rule inet aenv allowance accept")
            )
            flow.settimeout(10)
            assert flow.recv(100) == f"{HOST} 1".encode()


# What the node uses to reach a guest.


async def test_a_socket_of_the_slot_reaches_the_guest(network: Network, slot: Slot) -> None:
    with guest(network, slot) as vm:
        listener = vm.run(lambda: network_lab.serve(49983))
        with network.socket(slot) as connection:
            assert not connection.getblocking() and not connection.get_inheritable()
            loop = asyncio.get_running_loop()
            await asyncio.wait_for(loop.sock_connect(connection, (slot.guest_address, 49983)), 5)
            connection.shutdown(socket.SHUT_WR)
            assert await asyncio.wait_for(loop.sock_recv(connection, 100), 5) == f"{slot.gateway} 0".encode()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


async def test_the_tap_is_what_a_vmm_expects(network: Network, slot: Slot) -> None:
    fd = network.open_tap(slot)
    try:
        name, flags = network_lab.flags_of(fd)
        assert name == slot.tap
        assert flags & 0x5002 == 0x5002  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        with pytest.raises(Conflict, match="in use"):
            network.open_tap(slot)
    finally:
        os.close(fd)
    os.close(network.open_tap(slot))  # it outlives the one who had it


async def test_slots_look_alike_to_their_guests(network: Network) -> None:
    one, other = await asyncio.gather(network.create(), network.create())
    for field in ("tap", "guest_address", "prefix", "gateway", "mac", "mtu"):
        assert getattr(one, field) == getattr(other, field)
    assert (one.guest_address, one.prefix, one.gateway) == ("169.254.0.21", 30, "169.254.0.22")
    hardware = [in_slot(slot, lambda: command("ip", "-br", "link", "show", "tap0").split()[2]) for slot in (one, other)]
    assert hardware == [addresses.GATEWAY_MAC] * 2
    await asyncio.gather(network.destroy(one), network.destroy(other))


async def test_calls_on_a_slot_that_is_gone_say_so(network: Network) -> None:
    slot = await network.create()
    await network.destroy(slot)
    for call in (network.open_tap, network.socket):
        with pytest.raises(OperationFailed, match=f"slot {slot.index}"):
            call(slot)


# Life and death of slots.


async def test_fifty_at_once(network: Network) -> None:
    slots = await asyncio.gather(*(network.create() for _ in range(50)))
    assert len({slot.index for slot in slots}) == 50
    with guest(network, slots[0]) as one, guest(network, slots[-1]) as other:
        assert one.ask(OUTSIDE) == other.ask(OUTSIDE) == f"{HOST} 0"
    await asyncio.gather(*map(network.destroy, slots))


async def test_destroy_frees_the_number_and_may_be_repeated(network: Network, settings: Settings) -> None:
    before = traces(settings.run)
    slot = await network.create()
    await network.destroy(slot)
    assert traces(settings.run) == before
    await asyncio.gather(network.destroy(slot), network.destroy(slot))
    await network.open()
    assert traces(settings.run) == before


async def test_a_process_inside_does_not_keep_a_slot(network: Network, settings: Settings) -> None:
    before = traces(settings.run)
    slot = await network.create()
    tap = network.open_tap(slot)
    process = subprocess.Popen(["nsenter", f"--net={slot.netns}", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    process.stdin.write(b"x")
    process.stdin.flush()
    assert process.stdout.read(1) == b"x"  # it is inside now
    await network.destroy(slot)
    assert traces(settings.run) == before
    assert process.poll() is None
    os.close(tap)
    process.communicate()


async def test_a_later_server_adopts_what_runs_and_reaps_the_rest(network: Network, settings: Settings) -> None:
    kept, lost = await network.create(), await network.create()
    with guest(network, kept) as vm:
        await network.close()
        later = Network(settings)
        await later.open()
        assert await later.adopt(kept.index) == kept
        assert await later.reap([]) == [lost.index]
        assert vm.ask(OUTSIDE) == f"{HOST} 0"
        assert await later.adopt(lost.index) is None
        assert await later.reap([]) == []
    await later.destroy(kept)
    await later.close()


async def test_reap_spares_what_it_is_told_and_what_was_just_made(network: Network, settings: Settings) -> None:
    told = await network.create()
    await network.close()
    later = Network(settings)
    await later.open()
    mine = await later.create()
    assert await later.reap([told.index]) == []
    await later.destroy(mine)
    assert await later.reap([]) == [told.index]
    await later.close()


@pytest.mark.parametrize(
    "damage",
    ["ip link del tap0", "nft delete table inet aenv", "ip link del uplink"],
)
async def test_an_incomplete_slot_is_not_adopted_but_reaped(network: Network, settings: Settings, damage: str) -> None:
    slot = await network.create()
    in_slot(slot, lambda: command("sh", "-c", damage))
    await network.close()
    later = Network(settings)
    await later.open()
    assert await later.adopt(slot.index) is None
    assert await later.reap([]) == [slot.index]
    await later.close()


@pytest.mark.parametrize("index", [-1, 0, 31_999, 1 << 40])
async def test_no_slot_is_adopted_where_there_is_none(network: Network, index: int) -> None:
    assert await network.adopt(index) is None


async def test_files_of_an_earlier_boot_are_removed(network: Network, settings: Settings) -> None:
    # After a reboot a run directory on a disk still has the files, but nothing is mounted on them.
    network._next = 7
    for name in ("7", "9"):
        (settings.run / "netns" / name).touch()
    slot = await network.create()
    assert slot.index == 7 and slot == await network.adopt(7)
    assert await network.reap([]) == [9]
    await network.destroy(slot)


async def test_two_homes_share_a_machine(network: Network, slot: Slot, tmp_path: Path) -> None:
    neighbour = Network(Settings(home=tmp_path / "other", runtime=tmp_path / "other-run"))
    await neighbour.open()
    network._next = neighbour._next = slot.index
    slots = await asyncio.gather(*(one.create() for one in (network, neighbour) * 10))
    assert len({made.index for made in slots} | {slot.index}) == 21
    theirs = [made for made in slots if made.netns.is_relative_to(tmp_path / "other-run")]
    assert len(theirs) == 10
    await neighbour.destroy(slot)  # not theirs to destroy
    ours = {made.index for made in slots} - {made.index for made in theirs} | {slot.index}
    assert await network.reap(ours) == []
    with guest(neighbour, theirs[0]) as vm, guest(network, slot) as own:
        assert vm.ask(OUTSIDE) == own.ask(OUTSIDE) == f"{HOST} 0"
        await asyncio.gather(*map(neighbour.destroy, theirs[1:]))
        assert vm.ask(OUTSIDE) == f"{HOST} 0"
    await neighbour.destroy(theirs[0])
    await neighbour.close()
    with guest(network, slot) as own:
        assert own.ask(OUTSIDE) == f"{HOST} 0"
    await asyncio.gather(*(network.destroy(made) for made in slots if made not in theirs))


async def test_the_machine_s_table_stays_while_another_home_is_open_or_has_slots(lab: Lab, tmp_path: Path) -> None:
    def home(name: str) -> Network:
        return Network(Settings(home=tmp_path / name, runtime=tmp_path / f"{name}-run"))

    one, other = home("one"), home("other")
    await one.open()
    await other.open()
    await one.close()
    assert "inet aenv" in command("nft", "list", "tables")  # open, without a slot
    slot = await other.create()
    await other.close()
    assert "inet aenv" in command("nft", "list", "tables")  # a slot, without a server
    third = home("third")
    await third.open()
    await third.close()
    assert "inet aenv" in command("nft", "list", "tables")
    other = home("other")
    await other.open()
    assert await other.adopt(slot.index) == slot
    await other.destroy(slot)
    await other.close()
    assert "inet aenv" not in command("nft", "list", "tables")


async def test_links_and_tables_of_others_are_left_alone(network: Network, settings: Settings) -> None:
    command("ip", "link", "add", "aenvx", "group", str(network._group), "type", "bridge")
    command("ip", "link", "add", "aenv31", "type", "bridge")
    command("nft", "add table inet others")
    network._next = 31
    slot = await network.create()
    assert slot.index != 31
    assert await network.reap([]) == []
    await network.destroy(Slot(31, slot.netns, *("",) * 2, 0, *("",) * 2, 0, "aenv31"))
    for name in ("aenvx", "aenv31"):
        command("ip", "link", "del", name)
    command("nft", "delete table inet others")
    await network.destroy(slot)


async def test_no_more_slots_than_the_subnet_has_room_for(lab: Lab, tmp_path: Path) -> None:
    network = Network(Settings(home=tmp_path, runtime=tmp_path / "run", network=NetworkSettings(subnet="10.44.0.0/29")))
    await network.open()
    slots = await asyncio.gather(*(network.create() for _ in range(4)))
    with pytest.raises(Unavailable, match="4 on this machine"):
        await network.create()
    await network.destroy(slots.pop())
    slots.append(await network.create())
    await asyncio.gather(*map(network.destroy, slots))
    await network.close()


# Failures.

STEPS: list[tuple[object, str]] = [
    (host, "inner_settings"),
    (links, "claim"),
    (links, "configure"),
    (links, "make_tap"),
    (links, "furnish"),
    (Nftables, "run"),
    (namespace, "pin"),
    (namespace, "_mount"),
]


@pytest.mark.parametrize(("where", "name"), STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_create_that_fails_leaves_nothing(
    network: Network, settings: Settings, monkeypatch: pytest.MonkeyPatch, where: object, name: str, after: bool
) -> None:
    original = getattr(where, name)

    def fail(*arguments: object) -> object:
        if after:
            original(*arguments)
        raise OSError(errno.ENOSPC, "injected")

    before = traces(settings.run)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fail)
        with pytest.raises(OperationFailed, match=r"cannot create a network slot.*injected"):
            await network.create()
    if (name, after) == ("claim", True):
        await network.reap([])  # nothing to cut by hand: it was not known to be there, and went with its namespace
    assert traces(settings.run) == before
    slot = await network.create()
    await network.destroy(slot)


async def test_a_cancelled_create_is_undone(settings: Settings) -> None:
    settings.run.mkdir()
    before = traces(settings.run)
    for delay in range(12):
        network = Network(settings)
        await network.open()
        task = asyncio.create_task(network.create())
        await asyncio.wait([task], timeout=delay * 0.0004)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Slot):
            await network.destroy(result)
        await network.close()
        assert traces(settings.run) == before, delay


async def test_a_thread_that_cannot_come_back_leads_nothing_astray(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = namespace._setns
    calls = 0

    def fail(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:  # entering is allowed, coming back is not
            raise OSError(errno.ENOMEM, "injected")
        original(fd)

    with monkeypatch.context() as patch:
        patch.setattr(namespace, "_setns", fail)
        with pytest.raises(OperationFailed, match="injected"):
            await network.create()
        with pytest.raises(OperationFailed, match="injected"):
            await network.create()
    await network.reap([])
    slots = await asyncio.gather(*(network.create() for _ in range(12)))
    with guest(network, slots[-1]) as vm:
        assert vm.ask(OUTSIDE) == f"{HOST} 0"
    await asyncio.gather(*map(network.destroy, slots))


async def test_a_lack_of_file_descriptors_is_an_error_and_not_the_end(network: Network) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    failures = 0
    made: list[Slot] = []
    for spare in range(12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
        try:
            made.append(await network.create())
        except OperationFailed as error:
            assert "Too many open files" in str(error)
            failures += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failures > 2
    await asyncio.gather(*map(network.destroy, made))


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from aenv.config import Settings
from aenv.network import Network, namespace, links
from aenv.network.nft import Nftables
from aenv.network.rtnetlink import Rtnetlink

countdown = int(sys.argv[1])

def instrument(owner, name):
    original = getattr(owner, name)
    def step(*arguments, **options):
        global countdown
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)
    setattr(owner, name, step)

class Libc:
    def __init__(self, library):
        for name in ("setns", "unshare", "mount", "umount2"):
            setattr(self, name, getattr(library, name))
            instrument(self, name)

namespace._libc = Libc(namespace._libc)
for owner, names in ((Rtnetlink, "run"), (Nftables, "run"), (links, "make_tap"), (Path, "unlink"), (os, "open close")):
    for name in names.split():
        instrument(owner, name)

async def main():
    network = Network(Settings(home=Path(sys.argv[2]), runtime=Path(sys.argv[3])))
    await network.open()
    first = await network.create()
    second = await network.create()
    await network.destroy(first)
    print("done", flush=True)

asyncio.run(main())
"""


async def test_kill_9_between_any_two_steps_leaves_only_what_reap_removes(settings: Settings) -> None:
    settings.run.mkdir()
    before = traces(settings.run)
    finished = False
    left = 0
    for step in range(1, 1000):
        arguments = [sys.executable, "-c", KILLED, str(step), str(settings.home), str(settings.run)]
        done = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True)
        finished = done.returncode == 0
        assert finished or done.returncode == -signal.SIGKILL, done.stderr
        left += len(await reap(settings))
        assert traces(settings.run) == before, f"killed at step {step}"
        if finished:
            break
    assert finished and step > 40
    assert left > 10


# The machine.


async def test_a_subnet_that_the_machine_uses_is_refused(lab: Lab, tmp_path: Path) -> None:
    wan = network_lab.number("wan0")
    with Rtnetlink() as machine:
        machine.run(rtnetlink.add_address(wan, "10.55.3.1", 24))
    network = Network(Settings(home=tmp_path, runtime=tmp_path / "run", network=NetworkSettings(subnet="10.55.0.0/16")))
    try:
        with pytest.raises(SetupError, match=r"10\.55") as caught:
            await network.open()
        assert caught.value.remedy and "subnet" in caught.value.remedy
        assert any(finding.fatal for finding in diagnose(Settings(network=NetworkSettings(subnet="10.55.0.0/16"))))
    finally:
        command("ip", "addr", "del", "10.55.3.1/24", "dev", "wan0")
        await network.close()


async def test_a_route_to_a_wider_range_is_no_obstacle(lab: Lab, tmp_path: Path) -> None:
    network = Network(Settings(home=tmp_path, runtime=tmp_path / "run"))
    command("ip", "route", "add", "10.0.0.0/8", "via", "198.51.100.2")
    try:
        await network.open()
        slot = await network.create()
        with guest(network, slot) as vm:
            assert vm.ask(OUTSIDE) == f"{HOST} 0"
        await network.destroy(slot)
        await network.close()
    finally:
        command("ip", "route", "del", "10.0.0.0/8")


async def test_a_home_that_numbers_the_same_range_differently_is_refused(network: Network, tmp_path: Path) -> None:
    network._next = 16_384  # 10.11.128.0, which is slot 0 of the other home's subnet
    slot = await network.create()
    other = Network(Settings(home=tmp_path, runtime=tmp_path / "b", network=NetworkSettings(subnet="10.11.128.0/17")))
    with pytest.raises(SetupError, match=r"10\.11\.128\.0"):
        await other.open()
    await other.close()
    await network.destroy(slot)


def test_a_process_without_rights_is_told_which_it_lacks(tmp_path: Path) -> None:
    program = "from aenv.network import host; host.check()"
    done = subprocess.run(
        ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-all", sys.executable, "-c", program],
        capture_output=True,
        text=True,
    )
    assert "SetupError: network namespaces need CAP_NET_ADMIN (run as root" in done.stderr


def test_diagnose_finds_a_firewall_that_drops_and_nothing_else_here(lab: Lab) -> None:
    def messages() -> set[str]:
        return {finding.message for finding in diagnose(Settings())}

    before = messages()
    command(
        "nft",
        "-f",
        "-",
        stdin="table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }",
    )
    try:
        (found,) = messages() - before
        assert "ip filter FORWARD" in found
        command("nft", 'insert rule ip filter FORWARD iifname "aenv*" accept')
        assert messages() == before
    finally:
        command("nft", "delete table ip filter")
    assert not any("firewall" in message for message in before)


async def test_the_mtu_of_a_slot_is_the_machine_s_within_reason(lab: Lab, tmp_path: Path) -> None:
    wan = network_lab.number("wan0")
    for mtu, expected in ((1400, 1400), (9000, 1500)):
        network = Network(Settings(home=tmp_path, runtime=tmp_path / "run"))
        with Rtnetlink() as machine:
            machine.run(rtnetlink.set_hardware(wan, "02:00:00:00:00:01", mtu))
            await network.open()
            machine.run(rtnetlink.set_hardware(wan, "02:00:00:00:00:01", 1500))
        slot = await network.create()
        assert slot.mtu == expected
        inside = in_slot(slot, lambda: command("ip", "-o", "link"))
        assert inside.count(f"mtu {expected} ") == 2
        await network.destroy(slot)
        await network.close()
