"""Reads racks, nodes and the place of this process from the environment.

The parsers of Slurm's strings are pure. Unset variables give None or empty values.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mend.errors import ConfigError

RANKS_PER_RACK = "MEND_RANKS_PER_RACK"
RACKS = "MEND_RACKS"
DUMPS = ("NCCL_TOPO_DUMP_FILE", "NCCL_TOPO_FILE")
"""Variables that name an NCCL topology file; the first that is set counts."""

NODES_MAX = 65_536
"""Names that a Slurm set may stand for."""

ADDRESS_CHARS_MAX = 4096

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class Hints:
    """What the environment of one process says. `levels`: its Slurm switches or blocks, topmost
    first; () if Slurm knows no topology."""

    ranks_per_rack: int | None
    racks: int | None
    levels: tuple[str, ...]
    node: str
    """Slurm's name of this node; empty outside of Slurm."""
    node_number: int | None
    local_rank: int
    local_world: int
    world: int | None
    """Number of ranks of the job, if a launcher has set it."""
    dump: Path | None
    """An NCCL topology; the file need not exist yet."""


def read_hints() -> Hints:
    """Read all hints. Raises ConfigError for an invalid value."""
    address = os.environ.get("SLURM_TOPOLOGY_ADDR", "")
    pattern = os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    number = _whole("SLURM_NODEID", 0)
    return Hints(
        ranks_per_rack=_whole(RANKS_PER_RACK, 1),
        racks=_whole(RACKS, 1),
        levels=slurm_levels(address, pattern),
        node=os.environ.get("SLURMD_NODENAME", "") or _named(number),
        node_number=number,
        local_rank=_whole("LOCAL_RANK", 0) or 0,
        local_world=_whole("LOCAL_WORLD_SIZE", 1) or 1,
        world=_whole("WORLD_SIZE", 1),
        dump=next((Path(os.environ[name]) for name in DUMPS if os.environ.get(name)), None),
    )


def ranks_of_one_rack() -> int:
    """Number of ranks that the launcher has started, if the environment gives all of them the same
    rack number; else 1, because the script may give each its own."""
    ranks = _whole("WORLD_SIZE", 1) or 1
    return ranks if os.environ.get("MEND_RACK", "").strip() else 1


def _whole(name: str, least: int) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= least):
        raise ConfigError(name, text, f"needs a whole number, at least {least}", f"Change {name}.")
    return int(text)


def _named(number: int | None) -> str:
    """Name of the node with this number, which counts in the Slurm step, or else in the job."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        nodes = slurm_nodes(os.environ.get(name, ""), name)
        if nodes and number is not None:
            if number >= len(nodes):
                rule = f"is not a node of {name}, which names {len(nodes)}"
                raise ConfigError("SLURM_NODEID", number, rule, "Unset it, or say ranks_per_rack.")
            return nodes[number]
    return ""


def slurm_levels(address: str, pattern: str) -> tuple[str, ...]:
    """Switches (or the block) above a node, topmost first: ("rack1", "sw3") of `rack1.sw3.node7`.

    The pattern (`switch.switch.node`, `block.node`) says how many there are, because the name of a
    node may contain dots. If several switches of a level reach the node, the level is a set such as
    `s[0-1]`. Raises ConfigError if the two contradict each other.
    """
    if not address or not pattern:
        return ()
    kinds = pattern.split(".")
    parts = address.split(".", len(kinds) - 1) if len(address) <= ADDRESS_CHARS_MAX else []
    if len(parts) != len(kinds) or kinds[-1] != "node":
        rule = f"does not fit SLURM_TOPOLOGY_ADDR_PATTERN={pattern!r}"
        remedy = "Unset both, or say ranks_per_rack."
        raise ConfigError("SLURM_TOPOLOGY_ADDR", address[:80], rule, remedy)
    return tuple(parts[:-1])


def slurm_nodes(text: str, field: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """The names of a set such as `gpu[01-03,7],login`, in its order. Raises ConfigError for
    another form, and for one of more than NODES_MAX names."""
    names: list[str] = []
    try:
        for part in _parts(text):
            names += _expanded(part, NODES_MAX - len(names))
    except ValueError as error:
        remedy = "Unset it, or say ranks_per_rack."
        raise ConfigError(field, text[:80], f"is not a set of nodes: {error}", remedy) from None
    return tuple(names)


def _parts(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, start, depth = [], 0, 0
    for place, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError("brackets do not match")
        if char == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    if depth:
        raise ValueError("brackets do not match")
    return [part for part in (*parts, text[start:]) if part]


def _expanded(part: str, room: int) -> list[str]:
    """`r[0-1]n[1-2]` is r0n1, r0n2, r1n1, r1n2."""
    names = [""]
    for piece in re.findall(r"\[[^\]]*\]|[^\[\]]+", part):
        ends = _numbers(piece[1:-1], room) if piece.startswith("[") else [piece]
        if len(names) * len(ends) > room:
            raise ValueError(f"more than {NODES_MAX} names")
        names = [name + end for name in names for end in ends]
    return names


def _numbers(text: str, room: int) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"{item[:20]!r} is neither a number nor a range")
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high < low + room:
            raise ValueError(f"{item!r} has too many numbers, or they fall")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]
    return numbers
