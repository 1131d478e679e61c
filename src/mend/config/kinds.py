"""The kinds of values that settings may have. Pure: values in, values or ValueError out."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mend.types import RACKS_MAX, RANKS_MAX, fp32

NONE = "none"
"""None in the environment, in upper or lower case."""

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+(%\w+)?\]|\w[\w.-]*):(\d{1,5})", re.ASCII)
_HOST = re.compile(r"\w[\w.-]*", re.ASCII)
_JOB = re.compile(r"[\w.-]{1,64}", re.ASCII)
_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A rule for values. `accept` returns a value as it is stored, or raises ValueError or
    TypeError."""

    rule: str
    accept: Callable[[Any], Any]
    parse: Callable[[str], Any] = str
    """Parses the text of an environment variable to a value that `accept` takes."""
    unit: str = ""
    """Unit of a number, as the name of its setting ends in it; empty: it has none."""


def refuse_unless(fits: object) -> None:
    """Raise ValueError unless `fits`. A caller that knows the setting makes it a ConfigError."""
    if not fits:
        raise ValueError


def whole(low: int, high: int | None = None, unit: str = "") -> Kind:
    """An int. True and False are refused."""

    def accept(value: Any) -> int:
        refuse_unless(not isinstance(value, bool))
        number = operator.index(value)
        refuse_unless(low <= number and (high is None or number <= high))
        return number

    to = f", at least {low}" if high is None else f", {low} to {high}"
    return Kind(f"a whole number{to}", accept, int, unit)


def number(rule: str, fits: Callable[[float], bool], unit: str = "") -> Kind:
    """A finite float; an int is converted."""

    def accept(value: Any) -> float:
        refuse_unless(not isinstance(value, (bool, str)))
        result = float(value)
        refuse_unless(math.isfinite(result) and fits(result))
        return result

    return Kind(f"a number, {rule}", accept, float, unit)


def seconds(low: float = 0.0) -> Kind:
    """Seconds, at most a day."""
    return number(f"{low:g} to 86400 (seconds)", lambda value: low <= value <= 86_400, "s")


def text(rule: str, fits: Callable[[str], object]) -> Kind:
    """A str of a certain form."""

    def accept(value: Any) -> str:
        refuse_unless(isinstance(value, str) and fits(value))
        return str(value)

    return Kind(rule, accept)


def one_of(*names: str) -> Kind:
    """One of a few words."""
    return text(f"one of {', '.join(names)}", lambda value: value in names)


def either(kind: Kind, word: str, value: object) -> Kind:
    """`kind`, or `value`, which is written as `word` in the environment."""
    return Kind(
        f"{kind.rule}, or {word}",
        lambda given: value if given == value else kind.accept(given),
        lambda written: value if written.lower() == word else kind.parse(written),
        kind.unit,
    )


def optional(kind: Kind) -> Kind:
    """`kind`, or None."""
    return either(kind, NONE, None)


def is_address(written: str, port_min: int = 1) -> bool:
    """Return whether it is tcp://host:port; IPv6 numbers stand in brackets."""
    match = _ADDRESS.fullmatch(written)
    return match is not None and port_min <= int(match[3]) <= 65_535


def listed(written: str) -> list[str]:
    """The parts of a comma-separated list, stripped, without empty ones."""
    return [part.strip() for part in written.split(",") if part.strip()]


def _yes_no(value: Any) -> bool:
    refuse_unless(isinstance(value, bool))
    return bool(value)


def _word(written: str) -> bool:
    refuse_unless(written.lower() in _WORDS)
    return _WORDS[written.lower()]


def _peers(value: Any) -> tuple[str, ...]:
    """Return `rack=address` entries, ascending; plain addresses keep their form and order."""
    if isinstance(value, Mapping):
        value = [f"{rack}={address}" for rack, address in value.items()]
    entries = listed(value) if isinstance(value, str) else list(value)
    addresses: dict[int, str] = {}
    for position, entry in enumerate(entries):
        refuse_unless(isinstance(entry, str) and ("=" in entry) == ("=" in entries[0]))
        before, equals, address = entry.partition("=") if "=" in entry else ("", "", entry)
        rack = int(before) if equals else position
        refuse_unless(rack not in addresses and 0 <= rack < RACKS_MAX and is_address(address))
        addresses[rack] = address
    if entries and "=" not in entries[0]:
        return tuple(entries)
    return numbered(addresses)


def numbered(addresses: Mapping[int, str]) -> tuple[str, ...]:
    """`rack=address` entries, ascending by rack."""
    return tuple(f"{rack}={addresses[rack]}" for rack in sorted(addresses))


def _ports(value: Any) -> str:
    refuse_unless(isinstance(value, str))
    if value:
        low, high = map(int, value.split("-"))
        refuse_unless(1 <= low <= high <= 65_535)
    return str(value)


def _rack_numbers(value: Any) -> tuple[int, ...]:
    values = map(int, listed(value)) if isinstance(value, str) else value
    racks = tuple(sorted(map(whole(0, RACKS_MAX - 1).accept, values)))
    refuse_unless(len(set(racks)) == len(racks))
    return racks


def _sizes(value: Any) -> tuple[int, ...]:
    values = map(int, listed(value)) if isinstance(value, str) else value
    return tuple(map(whole(1, RANKS_MAX).accept, values))


def _names(value: Any) -> tuple[str, ...]:
    names = tuple(listed(value) if isinstance(value, str) else value)
    refuse_unless(all(isinstance(name, str) and name for name in names))
    refuse_unless(len(set(names)) == len(names))
    return names


def _path(value: Any) -> Path | None:
    return Path(value) if value is not None and os.fspath(value) else None


def _written_path(written: str) -> str | None:
    return None if written.lower() == NONE else written


YES_NO = Kind("true or false", _yes_no, _word)
SHARE = number("0 to 1", lambda value: 0 <= value <= 1)
MILLISECONDS = number("0 to 600000 (ms)", lambda value: 0 <= value <= 600_000, "ms")
OUTER_LR = number("above 0, at most 100", lambda value: value <= 100 and fp32(value) > 0)
MOMENTUM = number("at least 0, below 1", lambda value: 0 <= value < 1 and fp32(value) < 1)
POSITIVE = number("above 0", lambda value: value > 0)
JOB = text("1 to 64 of A-Z a-z 0-9 _ . -", _JOB.fullmatch)
BIND = text("tcp://host:port, or empty", lambda value: not value or is_address(value, port_min=0))
ADDRESS = text("tcp://host:port, or empty", lambda value: not value or is_address(value))
HOST = text(
    "a host name or IPv4 number, or empty", lambda value: not value or _HOST.fullmatch(value)
)
PEERS = Kind(
    "tcp://host:port of each rack in rack order, or rack=tcp://host:port of each, or empty; "
    "this rack's own may be left out",
    _peers,
)
PORTS = Kind("lowest-highest within 1-65535, or empty", _ports)
NAMES = Kind("distinct names", _names, listed)
FILE = Kind("a file, or none", _path, _written_path)
RACK_NUMBERS = Kind(
    "distinct numbers of racks", _rack_numbers, lambda written: [*map(int, listed(written))]
)
SIZES = Kind(
    "the number of ranks of each rack, in rack order",
    _sizes,
    lambda written: [*map(int, listed(written))],
)
FOLDER = Kind("a folder, or none", _path, _written_path)
