"""benchmarks.claims: figures of README.md and the peers pages, and the tables of losses in
quality.md, from files of benchmarks/results.

    python -m benchmarks.claims            # lists the figures that differ from their file
    python -m benchmarks.claims --write    # writes them

A claim is a piece of a page with a {} for each figure. Medians are rounded as the page shows them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import loss
from benchmarks.quality_table import paired_pct

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README, PEERS, DETAIL = "README.md", "docs/peers.md", "docs/internals/peers.md"
QUALITY = "docs/internals/quality.md"


@cache
def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


@dataclass(frozen=True)
class Claim:
    """`text`: as on the page, {} for a figure. `figures`: as the files have them."""

    page: str
    text: str
    figures: Callable[[], tuple[str, ...]]

    @property
    def expected(self) -> str:
        return self.text.format(*self.figures())

    @property
    def pattern(self) -> re.Pattern[str]:
        """What the page may show in its place: other figures."""
        return re.compile(re.escape(self.text).replace(r"\{\}", r"[-+\d.]+"))


def of_none(file: str, mode: str, delay_ms: int | None = None) -> list[float]:
    """Tokens per second, of those without exchange: medians by delay."""
    return [
        row["of_none"]["median"]
        for row in result(file)["rows"]
        if row["mode"] == mode and delay_ms in (None, row["delay_ms"])
    ]


def fixed(digits: int, *values: float) -> tuple[str, ...]:
    return tuple(f"{value:.{digits}f}" for value in values)


def signed(value: float) -> str:
    return f"{value:+.1f}"


def of_both(file: str) -> Callable[[], tuple[str, ...]]:
    """Overlapped and blocking, each in the order of delays."""
    return lambda: fixed(3, *of_none(file, "concurrent"), *of_none(file, "blocking"))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


BEST_RATE = 1.4e-3
"""Peak learning rate at which data parallel, mend and a rack alone end lower than at half and at
twice of it."""


def default_loss() -> tuple[str, ...]:
    """Percent above data parallel at equal tokens, from scratch at the best learning rate of both,
    paired by seed: 4 racks, 2 racks for four times as many steps, 2 racks, a rack alone."""
    rows = [json.loads(line) for line in (RESULTS / "loss.jsonl").read_text().splitlines()]

    def above(racks: int, steps: int, arm: str) -> str:
        own, base = (
            {
                row["seed"]: row["loss"]
                for row in rows
                if (row["racks"], row["steps"], row["start"]) == (racks, steps, "scratch")
                and (row.get("peak"), row["arm"]) == (BEST_RATE, name)
                and row.get("inner", "adamw") == "adamw"
            }
            for name in (arm, "data-parallel")
        )
        return signed(mean(paired_pct(own, base)))

    return (
        above(4, 1408, "mend"), above(2, 5632, "mend"), above(2, 1408, "mend"),
        above(2, 1408, "alone"),
    )  # fmt: skip


def over_a_link() -> tuple[str, ...]:
    """Tokens per second relative to no exchange, and MB per step, of mend and of DDP."""
    mend, ddp = (result("data_parallel.json")["modes"][mode] for mode in ("mend", "ddp"))
    sent = [each["bytes_per_step"] / 1e6 for each in (mend, ddp)]
    return (
        *fixed(2, mend["of_none"], sent[0], ddp["of_none"]),
        *fixed(1, sent[1]),
    )


def merge_pct() -> tuple[str, ...]:
    variants = result("merge.json")["variants"]
    shares = [variants[f"{n} racks with_digest"]["of_memcpy"]["median"] for n in (2, 4, 8)]
    return fixed(0, *(100 * share for share in shares))


def measured(file: str, digits: int) -> Callable[[], tuple[str, ...]]:
    return lambda: fixed(digits, result(file)["measured"])


def encoded() -> tuple[str, ...]:
    variants = result("encode.json")["variants"]
    return fixed(1, *(variants[f"{codec} codec"]["GBps"]["median"] for codec in ("int8", "int4")))


CLAIMS = (
    Claim(
        README,
        "| **{} and {}** overlapped, {} and {} blocking; losses equal bit for bit (",
        of_both("h200_sealed.json"),
    ),
    Claim(
        README,
        "| **{} and {}** overlapped, {} and {} blocking; the goal",
        of_both("h100_fsdp2.json"),
    ),
    Claim(README, "| **{} s** (torchft", measured("takeover.json", 1)),
    Claim(README, "| **{}**, {} MB; DDP {}, {} MB |", over_a_link),
    Claim(
        README,
        "has 4 racks ({} %) and four times as many steps ({} %) | **{} %**, a rack alone {} % |",
        default_loss,
    ),
    Claim(
        PEERS,
        "| mend | {} | {} | bf16 |\n| torchft | {} | {} | bf16 |",
        lambda: fixed(
            3,
            *(
                of_none("h100_torchft_fsdp2.json", mode)[0]
                for mode in ("concurrent", "blocking", "torchft-overlap", "torchft-blocking")
            ),
        ),
    ),
    Claim(DETAIL, "`outer_sync` (mend: {}x)", measured("outer_sync.json", 1)),
    Claim(DETAIL, "`merge` (mend: {}, {}, {} % for 2, 4, 8 racks, 1 thread)", merge_pct),
    Claim(DETAIL, "`heartbeat` (mend: {} ms)", measured("heartbeat.json", 0)),
    Claim(DETAIL, "`sideband` (mend: {} %, plain)", measured("sideband.json", 2)),
    Claim(DETAIL, "`hooks` (mend: {} us)", measured("hooks.json", 1)),
    Claim(DETAIL, "`encode` (mend: int8 {}, int4 {} GB/s)", encoded),
    Claim(
        DETAIL,
        "`takeover` (mend: {} s from the kill until the others merge again)",
        measured("takeover.json", 1),
    ),
)


def stale(claims: tuple[Claim, ...] = CLAIMS) -> Iterator[str]:
    """A sentence for each claim that its page does not show as the files have it."""
    for claim in claims:
        if claim.expected not in (ROOT / claim.page).read_text():
            yield f"{claim.page}: the files say {claim.expected!r}"


def write(claims: tuple[Claim, ...] = CLAIMS) -> None:
    for claim in claims:
        path = ROOT / claim.page
        path.write_text(claim.pattern.sub(lambda _, to=claim.expected: to, path.read_text()))


def loss_tables() -> list[str]:
    """Those of quality.md: at the best rate and above, and at half of it."""
    return [loss.of_page(peaks) for peaks in ((BEST_RATE, 2 * BEST_RATE), (BEST_RATE / 2,))]


def with_tables(page: str) -> str:
    """The page with its tables of losses as loss.jsonl has them."""
    tables = iter(loss_tables())
    return re.sub(r"\| size \| racks \|.*?(?=\n\n)", lambda _: next(tables), page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the figures into the pages")
    quality = ROOT / QUALITY
    if parser.parse_args().write:
        write()
        quality.write_text(with_tables(quality.read_text()))
    found = list(stale())
    if with_tables(quality.read_text()) != quality.read_text():
        found.append(f"{QUALITY}: the tables of losses are not those of loss.jsonl")
    print("\n".join(found) or f"{len(CLAIMS)} claims are as in benchmarks/results")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
