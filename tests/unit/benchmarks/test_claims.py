"""Figures of mend in README.md and the peers pages are those of a result file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import claims
from benchmarks.claims import (
    CLAIMS,
    DETAIL,
    PEERS,
    QUALITY,
    README,
    ROOT,
    Claim,
    loss_tables,
    stale,
    with_tables,
    write,
)
from benchmarks.loss import table


def rest_of(page: str, begin: str, end: str) -> list[str]:
    """The lines of a part of a page, without what its claims cover."""
    text = (ROOT / page).read_text()
    part = text[text.index(begin) : text.index(end)]
    for claim in CLAIMS:
        part = part.replace(claim.expected, re.sub(r"[-+\d.]|mend:", "", claim.expected))
    return part.splitlines()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page} {claim.text[:30]}")
def test_claim_is_on_its_page_as_the_files_have_it(claim: Claim) -> None:
    assert list(stale((claim,))) == []
    assert len(claim.pattern.findall((ROOT / claim.page).read_text())) == 1, "it is there once"


def test_every_result_of_the_readme_is_a_claim_or_a_peer_s() -> None:
    lines = rest_of(README, "| measured |", "The losses are of one GPU")
    results = [line.split("|") for line in lines if line.startswith("| ") and "---" not in line]
    assert len(results) >= 5, "the table is there"
    for line in lines:
        if not line.startswith("| ") or line.startswith("| measured"):
            continue
        result = line.removeprefix("| ").split("|", 1)[1].rsplit("|", 2)[0]
        ours = re.sub(
            r"torchft 0\.2\.0[^|]*|\(goal [^)]*\)|the goal of [^|]* is missed|H 16 with `int4`",
            "",
            result,
        )
        assert not re.search(r"\d", ours), f"no file has this figure: {line}"


def test_every_figure_of_mend_among_the_peers_is_a_claim() -> None:
    for line in rest_of(DETAIL, "**The peers alone", "mend's figures are taken"):
        assert "(mend:" not in line, f"no file has this figure: {line}"
    for line in rest_of(PEERS, "| | overlapped |", "torchft is better when"):
        assert not re.search(r"\d", line.removesuffix("bf16 |").removesuffix("float32 |")) or (
            not line.startswith("| ")
        ), f"no file has this figure: {line}"


def test_tables_of_losses_are_those_of_the_kept_rows() -> None:
    page = (ROOT / QUALITY).read_text()
    assert with_tables(page) == page
    assert all(page.count(each) == 1 for each in loss_tables())


def test_table_of_losses_has_the_t_interval_of_the_pairs_alone() -> None:
    """Brackets were the least and the greatest, and not said to be."""
    row = {"size": "5M", "racks": 2, "steps": 8, "start": "scratch"}
    losses = [("mend", 0, 1.1), ("mend", 1, 1.3), ("mend", 2, 9.0), ("alone", 0, 2.0)]
    losses += [("data-parallel", 0, 1.0), ("data-parallel", 1, 1.0)]
    rows = [row | dict(zip(("arm", "seed", "loss"), each, strict=True)) for each in losses]
    mend, alone, together = (line.split(" | ")[6:] for line in table(rows).splitlines()[2:])
    assert mend == ["mend", "3.800", "+20.0 [-107.1, +147.1]", "3 (2 paired) |"]
    assert alone == ["alone", "2.000", "+100.0", "1 |"]
    assert together == ["data-parallel", "1.000", "", "2 |"]


def test_figure_that_is_stale_is_named_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages kept the figures of runs that had been made again."""
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    (tmp_path / "hooks_of_a_test.json").write_text('{"measured": 6.28}')
    page = tmp_path / "page.md"
    page.write_text("`hooks` (mend: 0.9 us), and 0.9 us elsewhere\n")
    claim = Claim("page.md", "(mend: {} us)", claims.measured("hooks_of_a_test.json", 1))
    assert list(stale((claim,))) == ["page.md: the files say '(mend: 6.3 us)'"]
    write((claim,))
    assert page.read_text() == "`hooks` (mend: 6.3 us), and 0.9 us elsewhere\n"
    assert list(stale((claim,))) == []
