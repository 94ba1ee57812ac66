"""The user's terminal while it is lent to a process inside a sandbox."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aenv.client import Size

ESCAPE = ord("~")

_KNOWN_TERMINALS = {"ansi", "dumb", "linux", "rxvt", "vt100", "vt220"} | {
    name + colours for name in ("screen", "tmux", "xterm") for colours in ("", "-256color")
}
"""Terminals that even a small guest describes (Debian's ncurses-base)."""


def interactive() -> bool:
    """Whether a person sits at both ends."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def size() -> Size:
    """Size of the terminal, 80 by 24 if it will not say."""
    for descriptor in (sys.stdout.fileno(), sys.stdin.fileno()):
        try:
            cols, rows = os.get_terminal_size(descriptor)
        except OSError:
            continue
        if cols > 0 and rows > 0:
            return Size(cols, rows)
    return Size(80, 24)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that programs in the guest need to use this terminal."""
    term = environ.get("TERM", "")
    return {"TERM": term if term in _KNOWN_TERMINALS else "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}


@contextmanager
def raw(descriptor: int) -> Iterator[None]:
    """Every key goes to the guest, Ctrl-C and Ctrl-Z too; the terminal is put back whatever happens."""
    if not os.isatty(descriptor):
        yield
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Escape:
    """Finds ``~.`` at the start of a line, the way out when the other end no longer answers.

    ``~~`` at the start of a line is one tilde. A tilde anywhere else is nothing special.
    """

    def __init__(self) -> None:
        self._line_start = True
        self._held = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """What to send of ``data``, and whether the user wants out."""
        kept = bytearray()
        for byte in data:
            if self._held:
                self._held = False
                if byte == ord("."):
                    return bytes(kept), True
                kept.append(ESCAPE)
                if byte == ESCAPE:
                    self._line_start = False
                    continue
            elif self._line_start and byte == ESCAPE:
                self._held = True
                continue
            kept.append(byte)
            self._line_start = byte in b"\r\n"
        return bytes(kept), False
