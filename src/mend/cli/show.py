"""cli.show: the lines of several processes on one terminal, each behind the name of who said it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

COLOURS = (36, 33, 35, 32, 34, 31)
"""ANSI colours of racks 0, 1, ...; then again from the start."""

DIM = 2


def prefix(who: str, *, colours: bool) -> str:
    """`[rack 0] `; in colours when the reader is a terminal."""
    if not colours:
        return f"[{who}] "
    number = who.removeprefix("rack ")
    code = COLOURS[int(number) % len(COLOURS)] if number.isdigit() else DIM
    return f"\x1b[{code}m[{who}]\x1b[0m "


def lines_to(stream: TextIO) -> Callable[[str, str], None]:
    """A sink for `launch`: colours only on a terminal, and not when NO_COLOR is set."""
    colours = stream.isatty() and not os.environ.get("NO_COLOR")

    def sink(who: str, line: str) -> None:
        stream.write(f"{prefix(who, colours=colours)}{line}\n")
        stream.flush()

    return sink
