"""Cuts a rack's part of a checkpoint for another number of ranks than wrote it.

A tensor that every rank holds whole (DDP) is owned in equal slices; a tensor that `fully_shard` has
spread over all ranks (FSDP2) is owned by rows. Both are spans of the tensor in row-major order, so
the spans of the old ranks, end to end, can be cut again. The counts of the old ranks are divided
among the new ones, so that their sums stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from mend.engine.checkpoint.checkpoint_files import State
from mend.engine.compute.digest import StateDigest
from mend.engine.state.fragment_state import FragmentProgress, OfferProgress, RankProgress
from mend.errors import CheckpointError
from mend.fragment.shards import owned_by, whole_of
from mend.types import Layout, Owned

ReadRank = Callable[[int], tuple[State, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Recut:
    """From `then` to `now` ranks, for the new rank `rank`. `weights`: number of fragments of
    weights, the first ones."""

    layouts: Sequence[Layout]
    weights: int
    then: int
    now: int
    rank: int
    sharded_then: frozenset[str] = frozenset()
    """Tensors that the old ranks held by rows; they held all others whole."""
    sharded_now: frozenset[str] = frozenset()

    @property
    def of_shards(self) -> bool:
        return bool(self.sharded_then or self.sharded_now)

    def owned_then(self, fragment: int, rank: int) -> Owned:
        """What an old rank owned of a fragment; its spans are of whole tensors."""
        return owned_by(self.layouts[fragment], self.sharded_then, self.then, rank)

    def weights_digests(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
        """Per old rank and fragment, the digest of what the model has now in the old rank's spans.
        `tensors`: all that are exchanged. Collective over the ranks of the rack, one tensor at a
        time."""
        hexdigests: list[list[str]] = [[] for _ in range(self.then)]
        for fragment, layout in enumerate(self.layouts):
            owned = [self.owned_then(fragment, rank) for rank in range(self.then)]
            digests = [StateDigest(each.numel, 0) for each in owned]
            for i, slot in enumerate(layout.slots):
                whole_N = whole_of(tensors[slot.name]).reshape(-1)
                for each, digest in zip(owned, digests, strict=True):
                    if each.spans[i].numel:
                        theta_n = whole_N[slice(*each.spans[i])]
                        digest.feed(theta_n.to(torch.float32).cpu())
            for of_rank, digest in zip(hexdigests, digests, strict=True):
                of_rank.append(digest.hexdigest())
        return tuple(map(tuple, hexdigests))

    def state(self, ranks: Sequence[State]) -> State:
        """The new rank's state, from the states of the old ranks in their order. Steps, rounds and
        versions are those of the old ranks, tokens a share of their sum. Raises CheckpointError
        where the old ranks do not agree."""
        first = ranks[0].progress
        marks = [
            self._share(each.progress.fragments[p].tokens_mark for each in ranks)
            for p in range(len(first.fragments))
        ]
        discarded = self._share(each.progress.discarded for each in ranks)
        fragments = tuple(
            replace(each, digest="", weights="", tokens_mark=mark)
            for each, mark in zip(first.fragments, marks, strict=True)
        )
        progress = RankProgress(
            step=first.step,
            tokens=self._share(each.progress.tokens for each in ranks),
            merged=sum(marks[: self.weights]) - discarded,  # what is marked is merged or given up
            discarded=discarded,
            missed=first.missed,
            fragments=fragments,
        )
        return State(progress, tuple(self._offers(ranks, fragments)))

    def _offers(
        self, ranks: Sequence[State], fragments: Sequence[FragmentProgress]
    ) -> list[OfferProgress]:
        """The open offers of all old ranks. An offer counts the tokens since the last mark."""
        offers, open_ = [], [[(each.fragment, each.seq) for each in of.offers] for of in ranks]
        if any(each != open_[0] for each in open_):
            raise CheckpointError("ranks of one rack have other offers open in the checkpoint")
        for i, first in enumerate(ranks[0].offers):
            total = self._share(each.offers[i].tokens_total for each in ranks)
            tokens = total - fragments[first.fragment].tokens_mark
            offers.append(replace(first, tokens=tokens, tokens_total=total))
        return offers

    def _share(self, counts: Iterable[int]) -> int:
        """The new rank's share of the sum. Shares differ by one at most; the first ranks get more.
        A larger sum never gives a smaller share."""
        return (sum(counts) + self.now - 1 - self.rank) // self.now

    def tensors(self, read: ReadRank) -> tuple[list[State], dict[str, Tensor]]:
        """The old ranks' states, and the new rank's slices of their tensors. One old rank is in
        memory at a time. Raises CheckpointError for vectors that do not fit the plan."""
        states, slices = list[State](), dict[str, Tensor]()
        for rank in range(self.then):
            state, tensors = read(rank)
            states.append(state)
            for name, values in tensors.items():
                self._copy(rank, name, values, slices)
        return states, slices

    def _copy(self, then: int, name: str, values: Tensor, slices: dict[str, Tensor]) -> None:
        """Copy the new rank's part of an old rank's vectors: the values, then the outer states."""
        fragment = int(name.partition(".")[0])
        layout = self.layouts[fragment]
        old = self.owned_then(fragment, then)
        new = owned_by(layout, self.sharded_now, self.now, self.rank)
        if not old.numel:
            return
        if values.numel() % old.numel:
            raise CheckpointError(
                f"{name} of rank {then} has {values.numel()} elements; of the plan it has a "
                f"multiple of {old.numel}"
            )
        rows = values.view(-1, old.numel)
        if name not in slices:
            numel = rows.shape[0] * new.numel
            slices[name] = torch.empty(numel, dtype=torch.float32, device="cpu")
        target = slices[name].view(rows.shape[0], new.numel)
        for i, (there, here) in enumerate(zip(old.spans, new.spans, strict=True)):
            start, stop = max(there.start, here.start), min(there.stop, here.stop)
            if start < stop:
                taken = old.cuts[i] + start - there.start
                put = new.cuts[i] + start - here.start
                target[:, put : put + stop - start] = rows[:, taken : taken + stop - start]
