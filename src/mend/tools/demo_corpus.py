"""Real text without a download: the sources of the standard library, by package.

Every rack gets packages of its own and the held-out part gets others, so that the held-out loss
measures what was learnt and not what was remembered.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from mend.errors import ensure

HELD_OUT_PCT = 12
"""Share of the bytes that no rack trains on (in whole packages, so only roughly)."""

SKIPPED = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
    }
)
"""No tests (data in disguise), nothing installed (differs by machine), no tables or help texts."""

PACKAGE_BYTES_MAX = 400_000
"""A larger package is cut off here, so that no rack has a single subject."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes by rack (ascending) and the held-out bytes."""

    racks: tuple[bytes, ...]
    held_out: bytes


def packages(root: Path) -> dict[str, bytes]:
    """Text by top-level package or module of `root`, all in order; empty ones are left out."""
    found: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not SKIPPED.intersection(inside.parts):
            found.setdefault(inside.parts[0].removesuffix(".py"), []).append(path)
    texts = {name: b"\n".join(path.read_bytes() for path in paths) for name, paths in found.items()}
    return {name: text[:PACKAGE_BYTES_MAX] for name, text in sorted(texts.items()) if text}


def split(texts: dict[str, bytes], racks: int) -> Corpus:
    """Whole packages into held-out and racks, by their names' hashes, always to the emptiest part.

    Same packages, same split. Raises ValueError when there are fewer packages than parts.
    """
    if len(texts) <= racks:
        raise ValueError(
            f"{len(texts)} packages cannot be cut into {racks} racks and a held-out part"
        )
    share = [HELD_OUT_PCT / (100 - HELD_OUT_PCT) * racks] + [1.0] * racks
    parts: list[list[bytes]] = [[] for _ in share]
    sizes = [0] * len(share)
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        place = min(range(len(share)), key=lambda part: (sizes[part] / share[part], part))
        parts[place].append(texts[name])
        sizes[place] += len(texts[name])
    ensure(sum(sizes) == sum(map(len, texts.values())), "the split lost bytes", sizes=sizes)
    return Corpus(tuple(b"\n".join(part) for part in parts[1:]), b"\n".join(parts[0]))


def standard_library(racks: int) -> Corpus:
    """The standard library of the running Python."""
    return split(packages(Path(sysconfig.get_paths()["stdlib"])), racks)
