from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.cli.terminal import Escape, environment


def feed(escape: Escape, keys: bytes, cut: int = 1) -> tuple[bytes, bool]:
    sent = b""
    for start in range(0, len(keys), cut):
        some, out = escape.feed(keys[start : start + cut])
        sent += some
        if out:
            return sent, True
    return sent, False


@pytest.mark.parametrize("cut", [1, 2, 100])
@pytest.mark.parametrize(
    ("keys", "sent", "out"),
    [
        (b"ls\r", b"ls\r", False),
        (b"~.", b"", True),
        (b"ls\r~.more", b"ls\r", True),
        (b"ls ~.", b"ls ~.", False),
        (b"~~.", b"~.", False),
        (b"~/bin\r", b"~/bin\r", False),
        (b"cd ~\r~.", b"cd ~\r", True),
        (b"\r~\r~.", b"\r~\r", True),
        (b"~", b"", False),
    ],
)
def test_the_way_out(keys: bytes, sent: bytes, out: bool, cut: int) -> None:
    assert feed(Escape(), keys, cut) == (sent, out)


@given(st.binary(max_size=200).filter(lambda keys: b"~" not in keys), st.integers(1, 50))
def test_without_a_tilde_every_key_is_sent(keys: bytes, cut: int) -> None:
    assert feed(Escape(), keys, cut) == (keys, False)


@given(st.text("~.a\r", max_size=40), st.integers(1, 10))
def test_cutting_makes_no_difference(text: str, cut: int) -> None:
    keys = text.encode()
    assert feed(Escape(), keys, cut) == feed(Escape(), keys, 1000)


@pytest.mark.parametrize(
    ("term", "shown"),
    [("xterm", "xterm"), ("tmux-256color", "tmux-256color"), ("xterm-kitty", "xterm-256color"), ("", "xterm-256color")],
)
def test_the_guest_is_only_told_of_terminals_it_knows(term: str, shown: str) -> None:
    assert environment({"TERM": term})["TERM"] == shown
