"""Numbers, names and addresses of slots; and the rule sets as far as they are text."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import hypothesis.strategies as st
import pytest
from hypothesis import given

from aenv.errors import SetupError
from aenv.network import addresses, rules
from aenv.network.addresses import Subnet
from aenv.network.diagnose import forward_findings

PREFIXES = st.integers(8, 31)
SUBNETS = PREFIXES.flatmap(
    lambda prefix: st.integers(0, (1 << 24) - 1).map(
        lambda host: Subnet(IPv4Network((int(IPv4Address("10.0.0.0")) + host, prefix), strict=False))
    )
)


@given(SUBNETS, st.data())
def test_every_slot_has_two_neighbouring_addresses_of_its_own(subnet: Subnet, data: st.DataObject) -> None:
    one = data.draw(st.integers(0, subnet.capacity - 1))
    other = data.draw(st.integers(0, subnet.capacity - 1))
    pair = IPv4Network((subnet.host(one), 31))
    assert subnet.peer(one) == str(pair[1])
    assert subnet.host(one) in subnet and subnet.peer(one) in subnet
    assert (one == other) == pair.overlaps(IPv4Network((subnet.host(other), 31)))


@given(SUBNETS)
def test_no_slot_lies_outside_the_subnet(subnet: Subnet) -> None:
    assert 1 <= subnet.capacity <= addresses.MAX_SLOTS
    for index in (-1, subnet.capacity):
        with pytest.raises(ValueError, match="outside"):
            subnet.host(index)


def test_the_default_subnet_has_room_for_every_slot_of_a_machine() -> None:
    assert Subnet.parse("10.11.0.0/16").capacity == addresses.MAX_SLOTS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.11.0.0/99",
        "10.11.0.1/16",
        "10.11.0.0/32",
        "8.8.0.0/16",
        "0.0.0.0/0",
        "10.0.0.0/7",
        "169.254.0.0/16",
        "127.0.0.0/8",
        "198.51.100.0/24",
        "fd00::/64",
        "10.11.0.0/16; flush ruleset",
    ],
)
def test_a_subnet_that_cannot_be_used_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(SetupError) as caught:
        Subnet.parse(text)
    assert caught.value.remedy


@pytest.mark.parametrize("address", ["", "dns.example", "1.1.1.1 }", "fd00::1", "1.1.1.1/32", "01.1.1.1"])
def test_a_name_server_that_is_no_ipv4_address_is_refused(address: str) -> None:
    with pytest.raises(SetupError, match="dns"):
        addresses.resolvers(["1.1.1.1", address])


@given(st.integers(0, addresses.MAX_SLOTS - 1))
def test_a_link_name_says_its_slot_and_fits_the_kernel(index: int) -> None:
    name = addresses.link_name(index)
    assert addresses.link_index(name) == index
    assert len(name) < 16


@given(st.text(max_size=20))
def test_a_name_is_ours_only_if_we_would_have_given_it(text: str) -> None:
    for name in (text, f"aenv{text}"):
        index = addresses.link_index(name)
        assert index is None or addresses.link_name(index) == name


@pytest.mark.parametrize(
    "name", ["aenv", "aenv01", "aenv-1", "aenv32768", "aenv1 ", "aenv1\n", "aenv١", "eth0", "xaenv1"]
)
def test_names_of_others_are_not_ours(name: str) -> None:
    assert addresses.link_index(name) is None


@given(st.integers(0, addresses.MAX_SLOTS - 1), st.integers(0, addresses.MAX_SLOTS - 1))
def test_hardware_addresses_are_local_unicast_and_distinct(one: int, other: int) -> None:
    macs = {*addresses.link_macs(one), *addresses.link_macs(other), addresses.GUEST_MAC, addresses.GATEWAY_MAC}
    assert len(macs) == (6 if one != other else 4)
    assert all(int(mac[:2], 16) & 3 == 2 for mac in macs)


@given(st.integers(0, (1 << 32) - 1))
def test_the_owner_of_a_link_is_never_a_group_people_use(number: int) -> None:
    assert 1 << 30 <= addresses.link_group(f"{number:08x}") < 1 << 31


@pytest.mark.parametrize("tag", ["", "1234567", "123456789", "1234567g", "ABCDEF01"])
def test_a_tag_is_eight_hex_digits(tag: str) -> None:
    with pytest.raises(ValueError, match="hex"):
        addresses.link_group(tag)


def test_guest_and_gateway_share_a_network_of_their_own() -> None:
    link = IPv4Network((addresses.GUEST, addresses.PREFIX), strict=False)
    assert set(map(str, link.hosts())) == {addresses.GUEST, addresses.GATEWAY}


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "169.254.169.254", "127.0.0.1", "224.0.0.1"]
)
def test_private_ranges_are_denied(address: str) -> None:
    assert any(IPv4Address(address) in IPv4Network(network) for network in rules.DENIED)


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "172.32.0.1", "100.128.0.1", "192.0.2.1", "223.255.255.255"])
def test_public_addresses_are_not_denied(address: str) -> None:
    assert not any(IPv4Address(address) in IPv4Network(network) for network in rules.DENIED)


def chain(
    table: str, name: str, *, family: str = "ip", hook: str | None = "forward", policy: str = "accept"
) -> dict[str, object]:
    return {"chain": {"family": family, "table": table, "name": name, "hook": hook, "policy": policy}}


def rule(table: str, name: str, *expr: dict[str, object], family: str = "ip") -> dict[str, object]:
    return {"rule": {"family": family, "table": table, "chain": name, "expr": list(expr)}}


FROM_US: dict[str, object] = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "aenv*"}}
DOCKER = [chain("filter", "FORWARD", policy="drop"), chain("filter", "DOCKER-USER", hook=None)]
FIREWALLD = [
    chain("firewalld", "filter_FORWARD", family="inet"),
    rule("firewalld", "filter_FORWARD", {"reject": {"type": "icmpx"}}, family="inet"),
]
SUBNET = IPv4Network("10.11.0.0/16")


@pytest.mark.parametrize(
    ("ruleset", "remedy"),
    [
        (DOCKER, "iptables -I DOCKER-USER -i aenv+ -j ACCEPT"),
        (FIREWALLD, "firewall-cmd --permanent --zone=trusted --add-source=10.11.0.0/16"),
        ([chain("filter", "FORWARD", policy="drop")], "iptables -I FORWARD -i aenv+"),
        ([chain("filter", "FORWARD", policy="drop"), chain("filter", "ufw-user-forward", hook=None)], "ufw route"),
        ([chain("mine", "fwd", family="inet", policy="drop")], "nft insert rule inet mine fwd iifname"),
    ],
)
def test_a_firewall_that_drops_forwarded_packets_is_found(ruleset: list[dict[str, object]], remedy: str) -> None:
    (finding,) = forward_findings(ruleset, SUBNET)
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    "ruleset",
    [
        [],
        [chain("filter", "FORWARD")],
        [chain("filter", "INPUT", hook="input", policy="drop")],
        [chain("filter", "FORWARD", policy="drop", family="ip6")],
        [*DOCKER, rule("filter", "DOCKER-USER", FROM_US, {"accept": None})],
        [chain("f", "fwd"), rule("f", "fwd", FROM_US, {"drop": None})],
        [chain("aenv", "forward", family="inet", policy="drop")],
    ],
)
def test_a_firewall_that_lets_sandboxes_through_is_no_finding(ruleset: list[dict[str, object]]) -> None:
    assert not list(forward_findings(ruleset, SUBNET))
