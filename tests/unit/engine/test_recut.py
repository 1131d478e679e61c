"""What the ranks of a rack had in a checkpoint is cut anew for another number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from mend.consensus.units import all_free
from mend.engine.checkpoint.checkpoint import (
    FROZEN_FACT,
    Cuttable,
    Facts,
    RackCheckpoint,
    _recut,
    read_part,
    remedy_of_plan,
)
from mend.engine.checkpoint.checkpoint_files import (
    Manifest,
    State,
    begin_part,
    complete_part,
    end_part,
    files_in,
    rank_file,
    registered_file,
    summed,
    write_rank,
    write_whole,
)
from mend.engine.checkpoint.recut import Recut
from mend.engine.compute.digest import digest_of
from mend.engine.io.rack import RackGroup
from mend.engine.state.fragment_state import FragmentProgress, OfferProgress, RankProgress
from mend.errors import CheckpointError
from mend.fragment import build_plan
from mend.fragment.shards import replicated
from mend.types import Slot, Span

PLAN = build_plan(nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 1)]), 2)
"""Tensors of 15, 3, 3 and 1 elements: some ranks own nothing of the last."""

COUNTS = (1, 2, 3, 5)


ROWS = frozenset({"0.weight", "1.weight", "1.bias"})
"""Of 3, 1 and 1 rows; "0.bias" is held whole."""


def rows_of(slot: Slot, ranks: int, rank: int) -> Span:
    """As torch.chunk cuts them."""
    parts = torch.arange(slot.numel).view(slot.shape).chunk(ranks)
    mine = parts[rank].reshape(-1).tolist() if rank < len(parts) else []
    return Span(mine[0], mine[-1] + 1) if mine else Span(0, 0)


def of_ranks(
    ranks: int, vectors: int = 3, sharded: frozenset[str] = frozenset()
) -> list[dict[str, Tensor]]:
    """Per rank: values, and two outer states; of fragment 1 a residual, of fragment 0 a delta.
    Every element says what it is of."""
    found: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for layout in PLAN:
        p = layout.fragment
        for rank, tensors in enumerate(found):
            slices = replicated(layout, ranks, rank).owned.spans
            spans = [
                rows_of(slot, ranks, rank) if slot.name in sharded else span
                for slot, span in zip(layout.slots, slices, strict=True)
            ]
            rows = [
                torch.cat([
                    1000.0 * row + 100 * i + torch.arange(span.start, span.stop)
                    for i, span in enumerate(spans)
                ])
                for row in range(vectors)
            ]  # fmt: skip
            tensors[f"{p}.anchor"] = torch.cat(rows)
            tensors[f"{p}.{'residual' if p else 'delta'}"] = rows[1]
    return found


def state(tokens: int, rank: int = 0, **offer: Any) -> State:
    """Fragment 1 has an offer open; 3 tokens of each mark are given up."""
    marks = (tokens - 7, tokens - 20)
    fragments = tuple(
        FragmentProgress(4 + p, 9, f"d{rank}", 2, mark, 6, 8, 4, f"w{rank}")
        for p, mark in enumerate(marks)
    )
    progress = RankProgress(13, tokens, sum(marks) - 6, 6, (("late", 2),), fragments)
    made = {"seq": 2, "base": 5, "capture_step": 12, "tokens": 18, "steps": 6}
    total = tokens - 2
    return State(
        progress, (OfferProgress(1, **(made | offer), tokens_total=total, steps_total=12),)
    )


def recut(then: int, now: int, rank: int) -> Recut:
    return Recut(PLAN, 2, then, now, rank)


@pytest.mark.parametrize("then", COUNTS)
@pytest.mark.parametrize("now", COUNTS)
def test_slices_are_those_that_so_many_ranks_would_have(then: int, now: int) -> None:
    written = of_ranks(then)
    for rank, expected in enumerate(of_ranks(now)):
        _, found = recut(then, now, rank).tensors(lambda i: (state(50), written[i]))
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(found[name], values), name


@pytest.mark.parametrize("then", COUNTS)
@pytest.mark.parametrize("now", COUNTS)
@pytest.mark.parametrize(("was", "is_"), [(ROWS, ROWS), (ROWS, frozenset()), (frozenset(), ROWS)])
def test_shards_are_those_that_so_many_ranks_would_have(
    then: int, now: int, was: frozenset[str], is_: frozenset[str]
) -> None:
    """FSDP2, from it to ranks that hold everything, and back. Some ranks hold no row of a tensor,
    or nothing at all."""
    written = of_ranks(then, sharded=was)
    for rank, expected in enumerate(of_ranks(now, sharded=is_)):
        made = Recut(PLAN, 2, then, now, rank, was, is_)
        _, found = made.tensors(lambda i: (state(50), written[i]))
        for name, values in expected.items():
            assert torch.equal(found.get(name, torch.empty(0)), values), name


@pytest.mark.parametrize("then", COUNTS)
def test_weights_of_another_model_are_found_whose_shards_no_rank_has_any_more(then: int) -> None:
    model = nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 1)])
    parameters = dict(model.named_parameters())
    made = Recut(PLAN, 2, then, 1, 0, ROWS, frozenset())
    expected = []
    for rank in range(then):
        owned = [made.owned_then(p, rank) for p in range(2)]
        flats = [
            torch.cat([
                parameters[slot.name].detach().reshape(-1)[slice(*span)]
                for slot, span in zip(layout.slots, mine.spans, strict=True)
            ])
            for layout, mine in zip(PLAN, owned, strict=True)
        ]  # fmt: skip
        expected.append(tuple(digest_of(flat, flat.numel(), 0) for flat in flats))
    assert made.weights_digests(parameters) == tuple(expected)
    part = RackCheckpoint(
        Path("cut"), manifest(), state(50), {}, recut=made, weights_then=tuple(expected)
    )
    part = replace(part, manifest=msgspec.structs.replace(manifest(), facts=((FROZEN_FACT, "a"),)))
    with pytest.raises(CheckpointError, match="frozen parameters was a, is b here"):
        part.compared(parameters, lambda _: "b")
    unused: Any = None
    assert all(part.compared(parameters, lambda _: "a")._has_weights(p, unused) for p in range(2))
    model[1].bias.data += 1
    found = part.compared(parameters, lambda _: "a")
    fragment = next(p for p in range(2) if any(s.name == "1.bias" for s in PLAN[p].slots))
    assert not found._has_weights(fragment, unused)


@pytest.mark.parametrize("then", COUNTS)
@pytest.mark.parametrize("now", COUNTS)
def test_tokens_are_shared_out_and_every_ledger_closes(then: int, now: int) -> None:
    ranks = [state(50 + 3 * rank, rank) for rank in range(then)]
    made = [recut(then, now, rank).state(ranks) for rank in range(now)]
    for name in ("tokens", "merged", "discarded"):
        before = sum(getattr(each.progress, name) for each in ranks)
        assert sum(getattr(each.progress, name) for each in made) == before, name
    assert sum(o.tokens for each in made for o in each.offers) == 18 * then
    for each in made:
        progress = each.progress
        marks = [f.tokens_mark for f in progress.fragments]
        assert progress.merged + progress.discarded == sum(marks)
        assert all(0 <= mark <= progress.tokens for mark in marks)
        (offer,) = each.offers
        assert 0 <= offer.tokens == offer.tokens_total - marks[1]
        assert (progress.step, [f.version for f in progress.fragments]) == (13, [4, 5])
        assert (offer.seq, offer.base, offer.capture_step, offer.steps) == (2, 5, 12, 6)


def test_ranks_with_other_offers_and_vectors_of_another_plan_are_refused() -> None:
    with pytest.raises(CheckpointError, match="other offers open"):
        recut(2, 1, 0).state([state(50), state(50, seq=3)])
    written = of_ranks(2)
    written[1]["0.anchor"] = written[1]["0.anchor"][:-1]
    with pytest.raises(CheckpointError, match=r"0\.anchor of rank 1 has \d+ elements"):
        recut(2, 1, 0).tensors(lambda i: (state(50), written[i]))


# -------------------------------------------------------------- what cannot be cut anew


def manifest(codec: str = "float32", ranks: int = 2) -> Manifest:
    return Manifest(
        mend="0", name="cut", lineage="ab", number=1, racks=(0, 1), rack=0, ranks=ranks, wall_ns=1,
        step=13, open_tokens=86, versions=(1,), rounds=(1,), digests=(("a",) * ranks,),
        facts=(("codec", codec),), files=(),
    )  # fmt: skip


def test_other_shards_and_bases_of_powersgd_are_not_cut_anew() -> None:
    one, whole = RackGroup(None, 1.0), Cuttable(PLAN, 2, lambda *_: ())
    assert _recut(manifest(), one, whole) == recut(2, 1, 0)
    assert _recut(manifest(ranks=1), one, whole) is None
    assert _recut(manifest(), one, None) is None
    assert _recut(manifest("powersgd-4"), one, whole) is None
    assert remedy_of_plan(manifest(), 2).startswith(
        ". Go on with the settings and the model of the checkpoint, or begin a new job"
    )
    rows = msgspec.structs.replace(
        manifest(), facts=(("codec", "int8"), ("placement 0.weight", "S(0) over 2"))
    )
    kept = frozenset({"0.weight"})
    assert _recut(rows, one, whole) == Recut(PLAN, 2, 2, 1, 0, kept, frozenset())
    assert _recut(rows, one, replace(whole, moments=True)) is None, "moments of shards"
    pairs = (("codec", "int8"), ("placement 0.weight", "R S(0) over 2x1"))
    assert _recut(msgspec.structs.replace(manifest(), facts=pairs), one, whole) is None, "HSDP"
    rows_of_data = msgspec.structs.replace(manifest(), units=all_free(8))
    assert _recut(rows_of_data, one, whole) is None
    said = remedy_of_plan(manifest(), 1)
    assert "without powersgd and a data ledger" in said
    assert "Start 2 per rack, or begin a new job" in said
    assert "the 86 tokens that were not merged" in said


def written(folder: Path, facts: Facts) -> list[dict[str, Tensor]]:
    """A checkpoint of rack 0 with two ranks; returns their tensors."""
    part, tensors = folder / ".part-0", of_ranks(2)
    begin_part(part)
    for rank, mine in enumerate(tensors):
        write_rank(part / rank_file(rank), state(50, rank), mine)
        write_whole(part / registered_file(rank), b"registered %d" % rank)
    fragments = state(50).progress.fragments
    told = manifest()
    end_part(part, msgspec.structs.replace(
        told, racks=(0,), facts=facts, files=tuple(summed(part, files_in(part))),
        versions=tuple(f.version for f in fragments), rounds=tuple(f.rounds for f in fragments),
        digests=(("d0", "d1"),) * len(fragments),
    ))  # fmt: skip
    complete_part(folder, 0)
    return tensors


def test_a_folder_of_two_ranks_is_read_by_one_and_refused_to_shards(tmp_path: Path) -> None:
    then = (("codec", "float32"), ("ranks per rack", "2"))
    tensors = written(tmp_path, then)
    now, one = (then[0], ("ranks per rack", "1")), RackGroup(None, 1.0)
    part = read_part(tmp_path, 0, one, now, Cuttable(PLAN, 2, lambda *_: then))
    assert part is not None
    assert part.recut == recut(2, 1, 0)
    assert part.state.progress.tokens == 100
    assert part.weights_then == (("w0", "w0"), ("w1", "w1"))
    assert part.registered_B is not None
    assert bytes(part.registered_B.numpy()) == b"registered 0"
    total = sum(each["0.anchor"].numel() for each in tensors)
    assert part.tensors["0.anchor"].numel() == total
    with pytest.raises(CheckpointError) as raised:
        read_part(tmp_path, 0, one, now)
    said = str(raised.value)
    assert "of another plan: ranks per rack was 2, is 1 here. It was written by 2 ranks" in said
    assert "The number of ranks can change only for models that each rank holds whole" in said
    assert "Start 2 per rack, or begin a new job" in said
    other = (("codec", "int8"), then[1])
    with pytest.raises(CheckpointError, match=r"codec was float32, is int8 here\. Go on with"):
        read_part(tmp_path, 0, one, other, Cuttable(PLAN, 2, lambda *_: other))
    path = tmp_path / "rack-0" / rank_file(1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors is damaged"):
        read_part(tmp_path, 0, one, now, Cuttable(PLAN, 2, lambda *_: then))
