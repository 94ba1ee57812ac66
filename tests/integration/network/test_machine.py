"""What the machine must offer, and what is said if it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aenv.config import NetworkSettings, Settings
from aenv.errors import SetupError
from aenv.network import Network, diagnose, rtnetlink
from aenv.network.rtnetlink import Rtnetlink
from tests.integration.network import lab as network_lab
from tests.integration.network.lab import (
    HOST,
    OUTSIDE,
    Lab,
    command,
    guest,
    in_slot,
)


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
