"""What flows through a slot on the real kernel, and what does not."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest

from aenv.config import NetworkSettings, Settings
from aenv.errors import Conflict, OperationFailed
from aenv.network import Network, Slot, addresses, rtnetlink, rules
from aenv.network.rtnetlink import Rtnetlink
from tests.integration.network import lab as network_lab
from tests.integration.network.lab import (
    ECHO,
    HOST,
    OUTSIDE,
    PRIVATE,
    Lab,
    ask,
    command,
    guest,
    in_slot,
    inner,
    within,
)

FAST = 0.4
"""Seconds after which a packet that was dropped on purpose counts as dropped; others arrive in well under 10 ms."""


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
