"""The state machine under every order of events."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aenv.lifecycle import machine as lifecycle
from aenv.model import MachineShape, Sandbox, State

START = datetime(2026, 1, 1, tzinfo=UTC)


def record(state: State = "creating", **changes: object) -> Sandbox:
    base = Sandbox(
        sandbox_id="i1",
        template_id="t1",
        build_id="b1",
        name="base",
        kernel="6.1",
        shape=MachineShape(1, 512, 4096),
        state=state,
        started_at=START,
        end_at=START + timedelta(seconds=300),
        timeout=300,
        control_token="c",
        access_token="a",
    )
    return msgspec.structs.replace(base, **changes)


def after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def kinds(decision: lifecycle.Decision) -> list[str]:
    return [type(effect).__name__ for effect in decision.effects]


def test_a_life() -> None:
    decision = lifecycle.create(record())
    assert kinds(decision) == ["Start"]
    decision = lifecycle.decide(record(), lifecycle.Started(after(2), after(302)))
    assert decision.record is not None
    assert (decision.record.state, decision.record.end_at) == ("running", after(302))
    assert kinds(decision) == ["OpenRoute", "Timer"]
    decision = lifecycle.decide(decision.record, lifecycle.Expired(after(302)))
    assert decision.record is not None
    assert (decision.record.state, decision.record.reason) == ("killing", "its timeout ended")
    assert kinds(decision) == ["CloseRoute", "TearDown"]
    decision = lifecycle.decide(decision.record, lifecycle.TornDown())
    assert decision.record is None
    assert decision.effects == (lifecycle.Forget("its timeout ended"),)


def test_a_timer_that_lost_the_race_against_an_extension_is_set_again() -> None:
    running = record("running", end_at=after(600))
    decision = lifecycle.decide(running, lifecycle.Expired(after(300)))
    assert decision.record == running
    assert decision.effects == (lifecycle.Timer(after(600)),)


def test_extending_never_shortens_and_setting_may() -> None:
    running = record("running")
    assert lifecycle.decide(running, lifecycle.Extended(after(10))) == lifecycle.Decision(running)
    later = lifecycle.decide(running, lifecycle.Extended(after(900))).record
    assert later is not None
    assert later.end_at == after(900)
    sooner = lifecycle.decide(running, lifecycle.SetDeadline(after(10))).record
    assert sooner is not None
    assert sooner.end_at == after(10)


def test_the_end_of_an_earlier_vmm_means_nothing() -> None:
    running = record("running", generation=2)
    assert lifecycle.decide(running, lifecycle.VmmExited(1, "signal 9")) == lifecycle.Decision(running)
    ended = lifecycle.decide(running, lifecycle.VmmExited(2, "signal 9")).record
    assert ended is not None
    assert ended.reason == "its VMM ended: signal 9"


@pytest.mark.parametrize(
    ("state", "alive", "effects"),
    [
        ("running", True, ["OpenRoute", "Timer"]),
        ("running", False, ["CloseRoute", "TearDown"]),
        ("creating", False, ["CloseRoute", "TearDown"]),
        ("killing", False, ["CloseRoute", "TearDown"]),
    ],
)
def test_recovery(state: State, alive: bool, effects: list[str]) -> None:
    decision = lifecycle.recover(record(state), alive=alive)
    assert kinds(decision) == effects
    assert decision.record is not None
    assert decision.record.state == ("running" if alive else "killing")


times = st.integers(0, 2000).map(after)
events = st.one_of(
    st.builds(lambda now, length: lifecycle.Started(now, now + timedelta(seconds=length)), times, st.integers(1, 600)),
    st.builds(lifecycle.StartFailed, st.just("no boot")),
    st.builds(lifecycle.Killed),
    st.builds(lifecycle.Expired, times),
    st.builds(lifecycle.VmmExited, st.integers(1, 2), st.just("signal 9")),
    st.builds(lifecycle.SetDeadline, times),
    st.builds(lifecycle.Extended, times),
)


@given(st.sampled_from(["creating", "running", "killing"]), events)
def test_decide_is_a_function_of_its_arguments(state: State, event: lifecycle.Event) -> None:
    assert lifecycle.decide(record(state), event) == lifecycle.decide(record(state), event)


class AnyOrder(RuleBasedStateMachine):
    """What an executor would see: each effect that asks for an answer gets at most one, everything else comes at any
    time and in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.record: Sandbox | None = record()
        self.tear_downs = self.routes_closed = self.forgotten = 0
        self.routed = False
        self.timer: datetime | None = None

    @rule(event=events)
    def something_happens(self, event: lifecycle.Event) -> None:
        self.apply(event)

    @rule()
    def the_tear_down_ends(self) -> None:
        if self.tear_downs:
            self.apply(lifecycle.TornDown())

    def apply(self, event: lifecycle.Event) -> None:
        if self.record is None:
            return
        before = self.record
        decision = lifecycle.decide(before, event)
        if decision.record is None:
            assert isinstance(event, lifecycle.TornDown)
        elif before.state == "killing":
            assert decision == lifecycle.Decision(before), "an end is final"
        for effect in decision.effects:
            match effect:
                case lifecycle.TearDown():
                    self.tear_downs += 1
                case lifecycle.CloseRoute():
                    self.routed = False
                case lifecycle.OpenRoute():
                    self.routed = True
                case lifecycle.Timer():
                    self.timer = effect.at
                case lifecycle.Forget():
                    self.forgotten += 1
        self.record = decision.record

    @invariant()
    def only_a_running_sandbox_is_routed(self) -> None:
        assert self.routed == (self.record is not None and self.record.state == "running")

    @invariant()
    def a_running_sandbox_has_a_timer_for_its_deadline(self) -> None:
        if self.record is not None and self.record.state == "running":
            assert self.timer == self.record.end_at

    @invariant()
    def it_is_torn_down_once_and_forgotten_once(self) -> None:
        ended = self.record is None or self.record.state == "killing"
        assert self.tear_downs == (1 if ended else 0)
        assert self.forgotten == (1 if self.record is None else 0)


TestAnyOrder = AnyOrder.TestCase
