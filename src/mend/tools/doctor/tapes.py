"""What the tapes of an earlier run say of its plan and sizes. Reads the first chunk of each, and
nothing of what happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mend.config.settings import RANK_DEFAULT, codec_of
from mend.tools.doctor.estimate import params_of_tapes
from mend.tools.doctor.terms import Finding
from mend.trace.format import Header
from mend.trace.reader import read_header, tapes_in
from mend.types import WITNESS


@dataclass(frozen=True, slots=True)
class Planned:
    """Of one rack in its newest life."""

    rack: int
    plan: str
    params: int
    """Trained elements, by the payloads of its ranks; 0: not known."""
    ranks: int
    """Whose tapes are there."""


def planned_in(folder: Path) -> list[Planned]:
    """By rack, ascending, without the witness. Raises TapeError for what cannot be read."""
    headers = [read_header(path) for path in tapes_in([folder])]
    racks = sorted({header.rack for header in headers} - {WITNESS})
    return [_planned([each for each in headers if each.rack == rack]) for rack in racks]


def _planned(headers: Sequence[Header]) -> Planned:
    newest = {each.rank: each for each in sorted(headers, key=lambda each: each.wall_ns)}
    params = sum(
        params_of_tapes(_of_weights(each), _codec_of(each.config)) for each in newest.values()
    )
    plan = newest[0].plan if 0 in newest else next(iter(newest.values())).plan
    return Planned(headers[0].rack, plan, params, len(newest))


def _of_weights(header: Header) -> Sequence[int]:
    return header.payload_bytes[: len(header.payload_bytes) - header.moments]


def _codec_of(config: Mapping[str, object]) -> str:
    """By the settings on a tape."""
    compression = str(config.get("outer_step_compression_mode", "none"))
    rank = config.get("outer_step_compression_rank", RANK_DEFAULT)
    columns = rank if isinstance(rank, int) else RANK_DEFAULT
    return codec_of(compression, str(config.get("payload_dtype", "")), columns)


def of_planned(found: Sequence[Planned]) -> Iterator[Finding]:
    """Racks whose tapes lie in one folder should have had one plan."""
    plans = {each.plan for each in found}
    if len(plans) == 1:
        named = ", ".join(str(each.rack) for each in found)
        yield Finding("ok", "plan", f"the tapes of rack {named} are of plan {min(plans)[:12]}")
    else:
        told = "; ".join(f"rack {each.rack}: {each.plan[:12]}" for each in found)
        yield Finding(
            "problem",
            "plan",
            f"The tapes are of different plans ({told}).",
            "Same script, model and settings on all racks; or a folder of one run only.",
        )
