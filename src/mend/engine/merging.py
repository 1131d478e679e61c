"""Merges: payloads in, one anchor out; and the slices of sharded attempts. Runs on the loop; a
worker touches the elements.

All merged slices of an attempt are in one vector of this rank's part, each at its place: the own
slices are merged into it and served from it, the others are pulled into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from mend.coordination import events as ev
from mend.engine.digest import digests_of_tensors
from mend.engine.numerics import Anchor, Numerics
from mend.engine.sums import Tensors, factors_in
from mend.errors import Diverged, MendError, Unmergeable
from mend.transport.bulk_wire import checksum_of
from mend.types import Extent, offer_key, slice_key

if TYPE_CHECKING:
    from mend.engine.concurrent_outer_step import ConcurrentOuterStep

T = TypeVar("T")


class Merging:
    """Performs Measure, Sum and Merge. `tensors`: per fragment, the places of its tensors."""

    def __init__(self, rank: ConcurrentOuterStep, tensors: Sequence[Tensors]) -> None:
        self._rank, self._numerics, self._tensors = rank, rank.numerics, tensors

    def measure(self, effect: ev.Measure) -> None:
        key, tensors = effect.key, self._tensors[effect.fragment]
        anchor = self._rank.anchors[(effect.fragment, effect.version - 1)]

        def job(payloads: list[Tensor]) -> bytes:
            return self._numerics.measure(payloads, effect.weights, tensors, anchor)

        self._work(
            effect,
            job,
            lambda blob: self._rank.tell(ev.Measured(*key, blob)),
            lambda error, _: self._rank.tell(ev.Measured(*key, b"", error)),
        )

    def sum(self, effect: ev.Sum, tell: Callable[[ev.Event], None]) -> None:
        """Sum for the leader, which `tell` reaches."""
        key = effect.key

        def done(result: bytes | Exception) -> None:
            if isinstance(result, MendError):
                tell(ev.Summed(*key, b"", error=said(result)))
            elif isinstance(result, Exception):
                self._rank.broken(result)
            else:
                tell(ev.Summed(*key, result))

        self._rank.work(lambda: self._numerics.total(effect.partials), done)

    def merge(self, effect: ev.Merge) -> None:
        key, anchor = effect.key, self._rank.anchors[(effect.fragment, effect.version - 1)]
        tensors, numerics = self._tensors[effect.fragment], self._rank.numerics_of[effect.fragment]
        merged_N = self._rank.slicing.merged(*key) if effect.sharded else None

        def job(payloads: list[Tensor]) -> tuple[Anchor, bytes]:
            runs, version = None, effect.version
            if effect.total:
                factors = factors_in(effect.total, effect.weights, tensors)
                runs = tensors.runs(effect.weights, factors)
            rates = numerics.rates(
                anchor.rounds, effect.part, len(effect.members), effect.closing, effect.stretch
            )
            if merged_N is None:
                new = numerics.merge(
                    payloads, effect.weights, anchor, version,
                    runs=runs, part=effect.part, rates=rates,
                )  # fmt: skip
            else:
                new = numerics.finish(merged_N, anchor, version, effect.part, rates)
            taped = self._rank.tape is not None
            return new, digests_of_tensors(new.values, tensors.cuts) if taped else b""

        def done(result: tuple[Anchor, bytes]) -> None:
            new, digests = result
            self._rank.tentative[key] = new
            self._rank.tell(ev.Merged(*key, new.digest, tensors=digests))

        def failed(error: str, bad: tuple[int, ...]) -> None:
            offers = tuple(effect.members[position] for position in bad)
            self._rank.tell(ev.Merged(*key, "", error=error, bad=offers))

        self._work(effect, job, done, failed)

    def _work(
        self,
        effect: ev.Measure | ev.Merge,
        job: Callable[[list[Tensor]], T],
        done: Callable[[T], None],
        failed: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        """Do `job` with the payloads; first verify their checksums if the effect asks for it.

        `failed` gets the positions of the payloads that must not be merged. Before a payload is
        blamed, all are compared with their checksums: damage in this process is not the fault of a
        member.
        """
        rank, fragment = self._rank, effect.fragment
        sharded = isinstance(effect, ev.Merge) and effect.sharded
        members = () if sharded else effect.members
        names = [(member, fragment, seq) for member, seq in members]
        inputs = (
            [rank.payloads[name] for name in names],
            [rank.checksums[name] for name in names],
            rank.anchors[(fragment, effect.version - 1)],
        )

        def ended(result: T | list[int] | Exception) -> None:
            if isinstance(result, list):
                for position in result:
                    if position < 0:
                        rank.tell(ev.Spoiled(fragment, effect.version - 1))
                    else:
                        rank.tell(ev.Fetched(*names[position], error="its bytes changed in memory"))
                failed("an input was spoiled", ())
            elif isinstance(result, Unmergeable) and not sharded:
                self._blamed(effect, result, failed)
            elif isinstance(result, MendError):
                failed(said(result), ())
            elif isinstance(result, Exception):
                rank.broken(result)
            else:
                done(result)

        rank.work(partial(self._checked, job, effect.verify, *inputs), ended)

    def _checked(
        self,
        job: Callable[[list[Tensor]], T],
        verify: bool,
        payloads: list[Tensor],
        checksums: list[str],
        anchor: Anchor,
    ) -> T | list[int]:
        """The result of the job; or the positions of damaged inputs, -1 for the anchor."""
        spoiled = _spoiled(payloads, checksums, anchor) if verify else []
        try:
            return spoiled or job(payloads)
        except Unmergeable:
            spoiled = _spoiled(payloads, checksums, anchor)
            if spoiled:
                return spoiled
            if not payloads:
                raise  # merged slices do not tell which member is at fault
            raise self._numerics.blame(payloads, anchor) from None

    def _blamed(
        self,
        effect: ev.Measure | ev.Merge,
        error: Unmergeable,
        failed: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        """Report the payloads at fault. Without one, the anchor is at fault: fail this rank."""
        rank = self._rank
        if not error.positions:
            where = f"rack {rank.me.rack}, fragment {effect.fragment}, version {effect.version - 1}"
            rank.published.fail(Diverged(f"{where}: {error}. Load a checkpoint into all racks."))
        failed(str(error), error.positions)


def _spoiled(payloads: list[Tensor], checksums: list[str], anchor: Anchor) -> list[int]:
    """Positions of inputs whose bits have changed; -1 is the anchor."""
    bad = [
        i
        for i, (payload, checksum) in enumerate(zip(payloads, checksums, strict=True))
        if checksum_of(payload.numpy().data) != checksum
    ]
    return bad if anchor.recomputed() == anchor.digest else [-1, *bad]


def said(error: Exception | None) -> str:
    """The error in words; empty: there is none."""
    return f"{type(error).__name__}: {error}" if error is not None else ""


# ------------------------------------------------------------------ slices


Key = tuple[int, int, int]
"""(fragment, version, attempt)"""


@dataclass
class Attempt:
    """The slices of one attempt. `cuts`: where slice i begins, and where the last one ends.
    `parts`: by (rack, position), pulled slices of payloads that wait to be merged. `own`: positions
    of the slices that this rank has merged."""

    merged_N: Tensor
    cuts: list[int]
    parts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    own: list[int] = field(default_factory=list)

    def merged(self, position: int) -> Tensor:
        return self.merged_N[self.cuts[position] : self.cuts[position + 1]]


class Slicing:
    """Performs FetchSlice, MergeSlice and FreeSlices. `attempts`: the attempts not freed yet."""

    def __init__(self, rank: ConcurrentOuterStep) -> None:
        self._rank = rank
        self.attempts: dict[Key, Attempt] = {}

    def fetch(self, effect: ev.FetchSlice) -> None:
        rank, fragment, numerics = self._rank, effect.fragment, self._numerics(effect.fragment)
        key, own_rank = effect.key, rank.me.rank
        attempt = self._attempt(key, effect.count)
        if effect.seq:
            begin, end = _bytes(numerics, attempt, effect.position)
            part_B = numerics.buffers.empty(end - begin, torch.uint8, locked=False)
            extent = Extent(begin, numerics.payload_bytes(rank.owned[fragment]))
            at = offer_key(effect.member, own_rank, fragment, effect.seq)
        else:
            part_B = attempt.merged(effect.position).view(torch.uint8)
            extent = Extent(0, part_B.numel())
            at = slice_key(own_rank, *key, effect.position)

        def done(error: Exception | None) -> None:
            rank.pulls.end(effect.member.rack, meter, whole=error is None)
            if error is None and effect.seq:
                attempt.parts[effect.member.rack, effect.position] = part_B
            rack, size = effect.member.rack, part_B.numel()
            rank.tell(ev.SliceFetched(*key, rack, effect.seq, said(error), size))

        meter = rank.pulls.begin(effect.member.rack, part_B.numel())
        if part_B.numel():
            rank.host.fetch(effect.holders, at, "", part_B.numpy().data, done, extent, meter)
        else:
            done(None)

    def merge(self, effect: ev.MergeSlice) -> None:
        rank, numerics = self._rank, self._numerics(effect.fragment)
        key, position = effect.key, effect.position
        attempt = self._attempt(key, effect.count)
        begin, end = _bytes(numerics, attempt, position)
        inputs = [
            rank.payloads[(member, effect.fragment, seq)][begin:end]
            if member == rank.member
            else attempt.parts.pop((member.rack, position))
            for member, seq in effect.members
        ]
        out_n = attempt.merged(position)

        def done(result: Exception | None) -> None:
            if isinstance(result, MendError):
                rank.tell(ev.SliceMerged(*key, said(result)))
            elif isinstance(result, Exception):
                rank.broken(result)
            else:
                if self.attempts.get(key) is attempt and out_n.numel():
                    view = out_n.view(torch.uint8).numpy().data
                    rank.host.serve(slice_key(rank.me.rank, *key, position), view)
                    attempt.own.append(position)
                rank.tell(ev.SliceMerged(*key))

        rank.work(lambda: numerics.merge_slice(inputs, effect.weights, out_n), done)

    def free(self, effect: ev.FreeSlices) -> None:
        attempt = self.attempts.pop(effect.key, None)
        for position in attempt.own if attempt is not None else ():
            self._rank.host.drop(slice_key(self._rank.me.rank, *effect.key, position))

    def merged(self, fragment: int, version: int, attempt: int) -> Tensor:
        """All slices of an attempt; every one of them is here."""
        return self.attempts[fragment, version, attempt].merged_N

    def _attempt(self, key: Key, count: int) -> Attempt:
        if key not in self.attempts:
            owned, numerics = self._rank.owned[key[0]], self._numerics(key[0])
            cuts = numerics.cuts(owned, count)
            merged_N = numerics.buffers.empty(owned.numel, locked=False)
            self.attempts[key] = Attempt(merged_N, cuts)
        return self.attempts[key]

    def _numerics(self, fragment: int) -> Numerics:
        return self._rank.numerics_of[fragment]


def _bytes(numerics: Numerics, attempt: Attempt, position: int) -> tuple[int, int]:
    """The place of a slice in a payload."""
    return numerics.slice_bytes(attempt.cuts[position], attempt.cuts[position + 1])
