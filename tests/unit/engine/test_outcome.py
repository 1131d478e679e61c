"""How a rank ended, as the launcher reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mend.engine.state.outcome import (
    GOOD,
    WORDS,
    Outcome,
    RankEnd,
    read_ended,
    tell_begin,
    write_ended,
)
from mend.types import Peer


def test_the_launcher_reads_what_the_ranks_wrote_by_rack_and_rank(tmp_path: Path) -> None:
    told = [RankEnd(rack, rank, "merged", tokens=5) for rack in (1, 0) for rank in (1, 0)]
    for ended in told:
        write_ended(tmp_path, ended)
    write_ended(tmp_path, later := RankEnd(0, 1, "kept-local", "nobody heard it", 9, 90, 40.5))
    found = read_ended(tmp_path)
    assert [(e.rack, e.rank) for e in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[1] == later, "a later life of a rank replaces what the former one told"
    assert [e.good for e in found] == [True, False, True, True]
    assert "kept-local (" in str(later)
    assert str(later).endswith(": nobody heard it); 40 of 90 tokens are merged")


def test_a_rank_that_was_killed_at_the_end_does_not_speak_for_its_rack(tmp_path: Path) -> None:
    """torchrun ends the others as soon as one exits with 1. The launcher took their silence for a
    crash: it started a rack again whose weights were the only copy, and said that one that was
    evicted in order had died."""
    for rack in (0, 1, 2):
        for rank in (0, 1):
            tell_begin(Peer(rack, rank), tmp_path)
    write_ended(tmp_path, kept := RankEnd(0, 1, "kept-local", "nobody heard it", 9, 90, 40.5))
    write_ended(tmp_path, evicted := RankEnd(1, 0, "evicted", "it is slow", 9, 90, 90))
    found = read_ended(tmp_path)
    assert found[:2] == [kept, evicted]
    assert [(e.rack, e.rank, e.outcome) for e in found[2:]] == [
        (2, 0, "aborted"),
        (2, 1, "aborted"),
    ]


def test_a_file_that_no_rank_wrote_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rack0-rank0.json").write_text("{}")
    (tmp_path / "rack1-rank0.json").write_text('{"rack":1,"rank":0,"outcome":"perfect"}')
    (tmp_path / "rack2-rank0.json").write_bytes(b"\xff")
    assert read_ended(tmp_path) == []


def test_a_launcher_that_is_gone_needs_nothing(tmp_path: Path) -> None:
    write_ended(None, RankEnd(0, 0, "merged"))
    write_ended(tmp_path / "gone", RankEnd(0, 0, "merged"))
    assert not (tmp_path / "gone").exists()


def test_every_word_is_explained_and_the_good_ones_are_words() -> None:
    assert set(WORDS) >= GOOD
    assert all(Outcome(word).good == (word in GOOD) for word in WORDS)


def test_word_of_a_file_that_is_no_outcome_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="'fine' is not an outcome"):
        Outcome("fine")
