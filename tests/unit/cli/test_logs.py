from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aenv.cli.commands.logs import Tail

words = st.lists(st.text("ab ", max_size=3), max_size=30)


@given(words, st.lists(st.integers(0, 30), max_size=10))
def test_a_growing_console_is_shown_once_and_whole(lines: list[str], lengths: list[int]) -> None:
    """As long as the server still has its beginning."""
    tail = Tail([])
    shown: list[str] = []
    for length in sorted(lengths):
        shown += tail.fresh(lines[:length])
    shown += tail.rest(lines)
    assert shown == lines


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_console_of_which_the_server_has_only_the_end(first: int, second: int) -> None:
    lines = [f"line {number}" for number in range(80)]
    tail = Tail([])
    shown = tail.fresh(lines[:40])
    shown += tail.fresh(lines[min(first, 39) : 40 + second])
    shown += tail.rest(lines[min(first, 39) : 40 + second])
    assert shown == lines[: 40 + second]


def test_a_first_line_that_was_cut() -> None:
    tail = Tail([])
    shown = tail.fresh(["one", "two", "three"])
    shown += tail.fresh(["ne", "two", "three", "four", "five"])
    assert shown + tail.rest([]) == ["one", "two", "three", "four", "five"]


def test_the_last_line_may_not_be_finished() -> None:
    tail = Tail([])
    assert tail.fresh(["one", "tw"]) == ["one"]
    assert tail.fresh(["one", "two"]) == []
    assert tail.fresh(["one", "two"]) == ["two"]
    assert tail.fresh(["one", "two"]) == []


def test_lines_before_those_that_were_asked_for() -> None:
    tail = Tail(["old", "older"])
    assert tail.rest(["old", "older", "new"]) == ["new"]


def test_a_console_that_is_gone() -> None:
    tail = Tail([])
    assert tail.fresh(["one", "last words"]) == ["one"]
    assert tail.rest([]) == ["last words"]
