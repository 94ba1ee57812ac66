from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from aenv.cli import output


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m 00s"),
        (3599, "59m 59s"),
        (3600, "1h 00m"),
        (86399, "23h 59m"),
        (86400, "1d 00h"),
        (90 * 86400 + 7200, "90d 02h"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert output.span(seconds) == text


def test_moments() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert output.ago(now - timedelta(minutes=2), now) == "2m 00s ago"
    assert output.until(now + timedelta(seconds=5), now) == "in 5s"
    assert output.until(now - timedelta(seconds=5), now) == "now"


@pytest.mark.parametrize(
    ("mebibytes", "text"), [(0, "0 MiB"), (64, "64 MiB"), (512, "0.5 GiB"), (1000, "1000 MiB"), (4096, "4 GiB")]
)
def test_sizes(mebibytes: int, text: str) -> None:
    assert output.size(mebibytes) == text


def test_nobody_s_words_are_markup_or_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(["ID", "WORDS"], [["i1", "[red]x[/red]\x1b[2J"]])
    printed = capsys.readouterr().out
    assert "[red]x[/red]\ufffd[2J" in printed
    output.print_fields([("words", "a\x1b]0;title\x07b")])
    assert capsys.readouterr().out == "words  a\ufffd]0;title\ufffdb\n"


def test_a_narrow_terminal_folds_the_last_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    output.print_table(["ID", "METADATA"], [["i" + "x" * 20, "m" * 50]])
    printed = capsys.readouterr().out
    assert "i" + "x" * 20 in printed
    assert printed.count("m") == 50
