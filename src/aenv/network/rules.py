"""The two rule sets: one table on the host for all slots of the machine, one table inside each namespace.

The tables do different jobs, and each holds without the other. The host's keeps slots away from the host and from
each other. The namespace's decides what one guest may reach; it is where a policy goes: the chain ``allowance`` and the
sets ``denied`` and ``resolvers`` are replaced in one transaction while traffic flows. No established flow is exempt
from ``egress``, so a policy that becomes tighter also stops what it now forbids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, collapse_addresses

from aenv.network.addresses import GUEST, TAP, UPLINK

TABLE = "aenv"

MAX_FLOWS = 4096
"""Flows one guest may have at a time. The host tracks every one of them in a table that all sandboxes share."""

DENIED = (
    "0.0.0.0/8",  # this network
    "10.0.0.0/8",  # private, RFC 1918
    "100.64.0.0/10",  # carrier-grade NAT
    "127.0.0.0/8",  # loopback
    "169.254.0.0/16",  # link-local; metadata services of clouds live here
    "172.16.0.0/12",  # private
    "192.0.0.0/24",  # protocol assignments
    "192.168.0.0/16",  # private
    "198.18.0.0/15",  # benchmarks
    "224.0.0.0/3",  # multicast, reserved, broadcast
)


def host_table() -> str:
    """Replaces the host's table, whoever made it, in one transaction."""
    ours = '"aenv*"'
    return f"""
table inet {TABLE}
delete table inet {TABLE}
table inet {TABLE} {{
  chain prerouting {{
    type filter hook prerouting priority mangle; policy accept;
    # Before any DNAT, so that a port which another program publishes on the host is the host, too.
    iifname {ours} fib daddr type != unicast drop
    iifname {ours} fib saddr . iif oif missing drop
  }}
  chain input {{
    type filter hook input priority filter; policy accept;
    iifname {ours} drop
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname {ours} oifname {ours} drop
    iifname {ours} ct state invalid drop
    oifname {ours} ct state established,related accept
    oifname {ours} drop
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    iifname {ours} masquerade
  }}
}}
"""


def sandbox_table(subnet: IPv4Network, resolvers: Sequence[str]) -> str:
    """Makes the table of one namespace. ``resolvers`` are reachable on port 53 even inside a denied range."""
    denied = collapse_addresses([*map(IPv4Network, DENIED), subnet])
    return f"""
table inet {TABLE} {{
  set denied {{
    type ipv4_addr; flags interval
    {_elements(denied)}
  }}
  set resolvers {{
    type ipv4_addr
    {_elements(resolvers)}
  }}
  chain allowance {{
    accept
  }}
  chain egress {{
    ip daddr @resolvers meta l4proto {{ tcp, udp }} th dport 53 accept
    ip daddr @denied reject with icmpx admin-prohibited
    ct state new ct count over {MAX_FLOWS} reject with icmpx admin-prohibited
    jump allowance
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    ct state invalid drop
    iifname "{TAP}" oifname "{UPLINK}" ip saddr {GUEST} jump egress
    iifname "{UPLINK}" oifname "{TAP}" ct state established,related accept
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
    iifname "lo" accept
    ct state established,related accept
  }}
  chain output {{
    # What runs in the namespace speaks to the guest only; a VMM that was taken over gains nothing by its place.
    type filter hook output priority filter; policy drop;
    oifname {{ "lo", "{TAP}" }} accept
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{UPLINK}" masquerade
  }}
}}
"""


def _elements(values: Iterable[object]) -> str:
    joined = ", ".join(sorted({str(value) for value in values}))
    return f"elements = {{ {joined} }}" if joined else ""
