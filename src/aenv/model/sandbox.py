"""A sandbox: one microVM and everything the node knows of it."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from aenv.model.machine import MachineShape

State = Literal["creating", "running", "killing"]


class ProcessRecord(msgspec.Struct, frozen=True):
    """The VMM process, as its driver described it; opaque to everything but the driver."""

    driver: str
    data: bytes


class Sandbox(msgspec.Struct, frozen=True):
    """The durable record of a sandbox, written before every effect it describes.

    ``started_at``/``end_at`` are UTC; ``timeout`` is the TTL in seconds it was created with. ``slot`` and ``vmm`` are
    known once claimed. ``generation`` grows with every new VMM of the same sandbox, so that connections to an earlier
    one are never used again. ``reason`` says why it is being killed. The tokens are secrets: ``access_token`` is the
    user's for the agent, ``traffic_token`` the one that private ports want, ``control_token`` ours for internal calls.
    """

    sandbox_id: str
    template_id: str
    build_id: str
    name: str | None
    kernel: str
    shape: MachineShape
    state: State
    started_at: datetime
    end_at: datetime
    timeout: int
    control_token: str
    access_token: str | None
    traffic_token: str | None = None
    internet: bool | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    env: dict[str, str] = msgspec.field(default_factory=dict)
    generation: int = 1
    slot: int | None = None
    vmm: ProcessRecord | None = None
    reason: str | None = None
    idempotency_key: str | None = None
    fingerprint: str | None = None


class Ended(msgspec.Struct, frozen=True):
    """What remains of a sandbox that is gone: why, and when."""

    sandbox_id: str
    reason: str
    at: datetime
