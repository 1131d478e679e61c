"""Lines of several racks on one terminal: who said it always, colours only where somebody looks."""

from __future__ import annotations

import io

import pytest

from mend.cli.show import lines_to, prefix


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_plain_prefixes() -> None:
    file = io.StringIO()
    sink = lines_to(file)
    sink("rack 0", "step [bold]1[/bold]")
    sink("witness", "hello")
    assert file.getvalue() == "[rack 0] step [bold]1[/bold]\n[witness] hello\n"


def test_a_terminal_gets_a_colour_per_rack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    lines_to(terminal)("rack 1", "x")
    assert terminal.getvalue() == "\x1b[33m[rack 1]\x1b[0m x\n"
    assert prefix("rack 0", colours=True) != prefix("rack 1", colours=True)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    lines_to(terminal)("rack 1", "x")
    assert terminal.getvalue() == "[rack 1] x\n"
