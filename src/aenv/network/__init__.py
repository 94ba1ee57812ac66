"""Networks of sandboxes: one namespace each, a fixed guest address, NAT to the outside, nothing to the inside."""

from __future__ import annotations

from aenv.network.diagnose import Finding, diagnose
from aenv.network.slots import Network, Slot

__all__ = ["Finding", "Network", "Slot", "diagnose"]
