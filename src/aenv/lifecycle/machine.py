"""The state machine of a sandbox. No clock, no input or output, no randomness: every race is a unit test.

::

    create ──► creating ──Started──► running
                  │                    │
                  │ StartFailed        │ Killed, Expired, VmmExited
                  │ Killed             │
                  └────────► killing ◄─┘ ──TornDown──► gone (no record)

``decide(record, event)`` gives the next record and the effects that an executor has to carry out, in order, *after*
the record is durable. Results of effects come back as events. An event that no longer means anything in the current
state (a VMM that exits while it is being killed, a timer of an older deadline) changes nothing.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from aenv.model import Sandbox

# --- events -----------------------------------------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True):
    """The guest answers; the sandbox lives from ``now`` for its timeout."""

    now: datetime
    end_at: datetime


class StartFailed(msgspec.Struct, frozen=True):
    reason: str


class Killed(msgspec.Struct, frozen=True):
    """Somebody wants it gone."""

    reason: str = "killed by request"


class Expired(msgspec.Struct, frozen=True):
    """A timer fired. It may be an old one: the deadline in the record decides."""

    now: datetime


class VmmExited(msgspec.Struct, frozen=True):
    """The VMM of ``generation`` ended by itself; ``cause`` says how."""

    generation: int
    cause: str


class SetDeadline(msgspec.Struct, frozen=True):
    """Move the deadline, earlier or later."""

    end_at: datetime


class Extended(msgspec.Struct, frozen=True):
    """Move the deadline, but never to an earlier time."""

    end_at: datetime


class TornDown(msgspec.Struct, frozen=True):
    """Nothing of the sandbox is left on this node."""


Event = Started | StartFailed | Killed | Expired | VmmExited | SetDeadline | Extended | TornDown

# --- effects ----------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """Claim what the sandbox needs, boot it, wait for its agent; answer with Started or StartFailed."""


class OpenRoute(msgspec.Struct, frozen=True):
    """Let traffic in."""


class CloseRoute(msgspec.Struct, frozen=True):
    """Answer new requests as for an unknown sandbox, then cut the open connections."""


class Timer(msgspec.Struct, frozen=True):
    """Fire Expired at ``at``, in place of any earlier timer."""

    at: datetime


class TearDown(msgspec.Struct, frozen=True):
    """Abandon a start in progress, end the VMM, give everything back; answer with TornDown."""


class Forget(msgspec.Struct, frozen=True):
    """Replace the record by a note of why it ended."""

    reason: str


Effect = Start | OpenRoute | CloseRoute | Timer | TearDown | Forget


class Decision(msgspec.Struct, frozen=True):
    """``record`` None: the sandbox is gone."""

    record: Sandbox | None
    effects: tuple[Effect, ...] = ()


def create(record: Sandbox) -> Decision:
    """The first decision of a new sandbox; ``record.state`` must be creating."""
    assert record.state == "creating"
    return Decision(record, (Start(),))


def recover(record: Sandbox, *, alive: bool) -> Decision:
    """What to do with a record found at start-up. ``alive``: its VMM still runs and could be taken over.

    A start that was interrupted is undone: whoever asked for it got no answer.
    """
    if record.state == "running" and alive:
        return Decision(record, (OpenRoute(), Timer(record.end_at)))
    if record.state == "killing":
        return Decision(record, (CloseRoute(), TearDown()))
    lost = "the control plane stopped while it was starting" if record.state == "creating" else "its VMM ended"
    return _kill(record, f"{lost} (found at start-up)")


def decide(record: Sandbox, event: Event) -> Decision:
    """The next record and what follows from it."""
    match record.state, event:
        case "creating", Started():
            running = msgspec.structs.replace(record, state="running", started_at=event.now, end_at=event.end_at)
            return Decision(running, (OpenRoute(), Timer(event.end_at)))
        case "creating", StartFailed():
            return _kill(record, event.reason)
        case "creating", VmmExited():
            return Decision(record)  # the start in progress notices by itself and says more about it
        case (("creating" | "running"), Killed()):
            return _kill(record, event.reason)
        case "running", VmmExited():
            if event.generation != record.generation:
                return Decision(record)
            return _kill(record, f"its VMM ended: {event.cause}")
        case "running", Expired():
            if event.now < record.end_at:
                return Decision(record, (Timer(record.end_at),))
            return _kill(record, "its timeout ended")
        case "running", SetDeadline():
            return _move(record, event.end_at)
        case "running", Extended():
            return _move(record, event.end_at) if event.end_at > record.end_at else Decision(record)
        case "killing", TornDown():
            return Decision(None, (Forget(record.reason or "killed"),))
        case _:
            return Decision(record)


def _kill(record: Sandbox, reason: str) -> Decision:
    return Decision(msgspec.structs.replace(record, state="killing", reason=reason), (CloseRoute(), TearDown()))


def _move(record: Sandbox, end_at: datetime) -> Decision:
    return Decision(msgspec.structs.replace(record, end_at=end_at), (Timer(end_at),))
