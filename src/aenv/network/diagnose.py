"""What stands between this machine and working sandbox networks, found without changing anything."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import msgspec

from aenv.config import Settings
from aenv.errors import AenvError, SetupError
from aenv.network import addresses, host, rules
from aenv.network.addresses import Subnet
from aenv.network.nft import Nftables
from aenv.network.rtnetlink import Rtnetlink
from aenv.programs import system_program

_FLOWS = Path("/proc/sys/net/netfilter/nf_conntrack_max")
_LEGACY_TABLES = Path("/proc/thread-self/net/ip_tables_names")


class Finding(msgspec.Struct, frozen=True):
    """``fatal``: no sandbox can start, rather than that something it tries will not work."""

    message: str
    remedy: str
    fatal: bool = False


def diagnose(settings: Settings) -> list[Finding]:
    """Look at this machine, and at the settings, for what would keep sandboxes from their network. Changes nothing.
    Blocking; takes some 10 ms."""
    return list(_findings(settings))


def _findings(settings: Settings) -> Iterator[Finding]:
    try:
        host.check()
        nftables = Nftables()
        subnet = Subnet.parse(settings.network.subnet)
        resolvers = addresses.resolvers(settings.network.dns)
        with Rtnetlink() as connection:
            host.check_subnet(connection, subnet)
            routes, own = connection.routes(), {address for _, address in connection.addresses()}
        ruleset = nftables.list("list ruleset")
    except (AenvError, OSError) as error:
        remedy = error.remedy if isinstance(error, SetupError) else None
        message = error.message if isinstance(error, AenvError) else str(error)
        yield Finding(message, remedy or "run as root, with nf_tables in the kernel", fatal=True)
        return
    if not os.access("/proc/sys/net/ipv4/ip_forward", os.W_OK):
        yield Finding("/proc/sys/net cannot be written", "in a container, use --privileged", fatal=True)
    if all(destination != "0.0.0.0/0" for destination, _ in routes):
        yield Finding(
            "this machine has no default route, so sandboxes cannot reach anything", "ip route add default via …"
        )
    for address in resolvers:
        if address in own or IPv4Address(address).is_loopback:
            yield Finding(
                f"the name server {address} is this machine itself, which sandboxes may not reach",
                "set [network] dns to one on another machine",
            )
    yield from _mounts()
    yield from _flows()
    yield from forward_findings(ruleset, subnet.network)
    yield from _legacy(subnet.network)


def forward_findings(ruleset: list[dict[str, Any]], subnet: IPv4Network) -> Iterator[Finding]:
    """Chains of other programs that throw forwarded packets of sandboxes away. An accept of ours cannot overrule
    them: a packet has to pass every chain. ``ruleset`` is what ``nft -j list ruleset`` lists."""
    chains = [entry["chain"] for entry in ruleset if "chain" in entry]
    texts: dict[tuple[str, str], str] = {}
    last: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for rule in (entry["rule"] for entry in ruleset if "rule" in entry):
        table = (rule["family"], rule["table"])
        texts[table] = texts.get(table, "") + json.dumps(rule["expr"])
        last[*table, rule["chain"]] = rule["expr"]
    for chain in chains:
        family, name = chain["family"], chain["table"]
        if chain.get("hook") != "forward" or family not in ("ip", "inet") or (family, name) == ("inet", rules.TABLE):
            continue
        end = last.get((family, name, chain["name"]), [])
        refuses = not any("match" in part for part in end) and any("drop" in part or "reject" in part for part in end)
        text = texts.get((family, name), "")
        if (chain.get("policy") != "drop" and not refuses) or '"aenv' in text or str(subnet.network_address) in text:
            continue
        neighbours = {other["name"] for other in chains if (other["family"], other["table"]) == (family, name)}
        yield Finding(
            f"the firewall chain {family} {name} {chain['name']} drops forwarded packets, so sandboxes cannot reach "
            "anything outside",
            _remedy(family, name, chain["name"], neighbours, subnet),
        )


def _remedy(family: str, table: str, chain: str, neighbours: set[str], subnet: IPv4Network) -> str:
    if "DOCKER-USER" in neighbours:
        return _iptables("iptables", "DOCKER-USER")
    if table == "firewalld":
        return f"firewall-cmd --permanent --zone=trusted --add-source={subnet} && firewall-cmd --reload"
    if "ufw-user-forward" in neighbours:
        return f"ufw route allow from {subnet}"
    if chain == "FORWARD":
        return _iptables("iptables", chain)
    rule = f"nft insert rule {family} {table} {chain}"
    return f"""{rule} iifname '"aenv*"' accept; {rule} oifname '"aenv*"' ct state established,related accept"""


def _iptables(program: str, chain: str) -> str:
    return (
        f"{program} -I {chain} -i aenv+ -j ACCEPT; "
        f"{program} -I {chain} -o aenv+ -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
    )


def _legacy(subnet: IPv4Network) -> Iterator[Finding]:
    """The old iptables keeps its rules where nftables does not see them."""
    try:
        if "filter" not in _LEGACY_TABLES.read_text().split():
            return
    except OSError:
        return
    program = "iptables-legacy"
    try:
        path = system_program(program, "iptables")
        listing = subprocess.run([path, "-S"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (AenvError, OSError, subprocess.SubprocessError) as error:
        yield Finding(
            f"legacy iptables rules are loaded but cannot be listed: {error}", f"look at `{program} -S FORWARD`"
        )
        return
    if "-P FORWARD DROP" in listing and "aenv" not in listing and str(subnet.network_address) not in listing:
        chain = "DOCKER-USER" if "-N DOCKER-USER" in listing else "FORWARD"
        yield Finding(
            "legacy iptables drops forwarded packets, so sandboxes cannot reach anything outside",
            _iptables(program, chain),
        )


def _mounts() -> Iterator[Finding]:
    try:
        apart = Path("/proc/1/ns/mnt").stat().st_ino != Path("/proc/self/ns/mnt").stat().st_ino
    except OSError:
        return
    if apart:
        yield Finding(
            "this process has mounts of its own: running sandboxes cannot be taken over after it ends",
            "drop PrivateTmp=, ProtectSystem=, ReadWritePaths= and the like from the systemd unit",
        )


def _flows() -> Iterator[Finding]:
    try:
        limit = int(_FLOWS.read_text())
    except (OSError, ValueError):
        return
    if limit < 16 * rules.MAX_FLOWS:
        yield Finding(
            f"this machine tracks {limit} network flows at most, and one sandbox may use {rules.MAX_FLOWS} of them",
            f"sysctl -w {'.'.join(_FLOWS.parts[-3:])}={64 * rules.MAX_FLOWS}",
        )
