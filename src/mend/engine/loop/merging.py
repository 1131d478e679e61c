"""Merges payloads to one anchor, in whole or in slices (sharded attempts). Runs on the loop; a
worker touches the elements.

All merged slices of an attempt lie in one vector as long as this rank's part, each at its place:
the own slices are merged into it and served from it, the others are pulled into it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from mend.coordination import events as ev
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.digest import digests_of_tensors
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.payload_checks import blame
from mend.engine.compute.sums import factors_in
from mend.engine.loop.jobs import Jobs
from mend.engine.loop.store import Attempt, Payload, TensorStore
from mend.errors import Diverged, Unmergeable, format_error
from mend.transport.bulk_wire import checksum_of
from mend.types import Extent

T = TypeVar("T")


class Merging:
    """Performs Measure, Sum and Merge. `numerics`: of weights. `taped`: digest every tensor of a
    result for the tape."""

    def __init__(self, store: TensorStore, jobs: Jobs, numerics: Numerics, *, taped: bool) -> None:
        self._store, self._jobs, self._numerics, self._taped = store, jobs, numerics, taped

    def measure(self, effect: ev.Measure) -> None:
        key, tensors = effect.key, self._store.rules[effect.fragment].tensors
        anchor = self._store.anchors[effect.fragment, effect.version - 1]

        def job(payloads: list[Tensor]) -> bytes:
            return self._numerics.measure(payloads, effect.weights, tensors, anchor)

        self._work(
            effect,
            job,
            lambda blob: self._jobs.tell(ev.Measured(*key, blob)),
            lambda error, _: self._jobs.tell(ev.Measured(*key, b"", error)),
        )

    def sum(self, effect: ev.Sum, tell: Callable[[ev.Event], None]) -> None:
        """Add up the partials of all ranks. `tell`: gives an event to the leader, which asked."""
        key = effect.key
        self._jobs.run(
            lambda: self._numerics.total(effect.partials),
            lambda total: tell(ev.Summed(*key, total)),
            lambda error: tell(ev.Summed(*key, b"", error=format_error(error))),
        )

    def merge(self, effect: ev.Merge) -> None:
        key, anchor = effect.key, self._store.anchors[effect.fragment, effect.version - 1]
        rules, taped = self._store.rules[effect.fragment], self._taped
        tensors, numerics = rules.tensors, rules.numerics
        merged_N = self._store.attempts[key].merged_N if effect.sharded else None

        def job(payloads: list[Tensor]) -> tuple[Anchor, bytes, float | None]:
            runs, version = None, effect.version
            if effect.total:
                factors = factors_in(effect.total, effect.weights, tensors)
                runs = tensors.runs(effect.weights, factors)
            rates = numerics.rates(
                anchor.rounds, effect.part, len(effect.members), effect.closing, effect.stretch,
                effect.waits,
            )  # fmt: skip
            if merged_N is None:
                new = numerics.merge(
                    payloads, effect.weights, anchor, version,
                    runs=runs, part=effect.part, rates=rates,
                )  # fmt: skip
            else:
                new = numerics.finish(merged_N, anchor, version, effect.part, rates)
            digests = digests_of_tensors(new.values, tensors.cuts) if taped else b""
            return new, digests, numerics.compare(payloads, anchor) if payloads else None

        def done(result: tuple[Anchor, bytes, float | None]) -> None:
            new, digests, cosine = result
            merged = numerics.agreement.merged()
            numerics.agreement = merged.with_cosine(cosine, len(effect.members))
            self._store.put_tentative(key, new)
            self._jobs.tell(ev.Merged(*key, new.digest, tensors=digests))

        def failed(error: str, bad: tuple[int, ...]) -> None:
            offers = tuple(effect.members[position] for position in bad)
            self._jobs.tell(ev.Merged(*key, "", error=error, bad=offers))

        self._work(effect, job, done, failed)

    def _work(
        self,
        effect: ev.Measure | ev.Merge,
        job: Callable[[list[Tensor]], T],
        done: Callable[[T], None],
        failed: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        """Do `job` with the payloads; first verify their checksums if the effect asks for it.

        `failed` gets the error in words, and the positions of the payloads that must not be merged.
        Before a payload is blamed, all are compared with their checksums: damage in this process is
        not the fault of a member.
        """
        store, fragment = self._store, effect.fragment
        sharded = isinstance(effect, ev.Merge) and effect.sharded
        members = () if sharded else effect.members
        names = [(member, fragment, seq) for member, seq in members]
        payloads = [store.payloads[name] for name in names]
        anchor = store.anchors[fragment, effect.version - 1]

        def ended(result: T | list[int]) -> None:
            if not isinstance(result, list):
                done(result)
                return
            for position in result:
                if position < 0:
                    self._jobs.tell(ev.Spoiled(fragment, effect.version - 1))
                else:
                    error = "its bytes changed in memory"
                    self._jobs.tell(ev.Fetched(*names[position], error=error))
            failed("an input failed its checksum", ())

        def refused(error: Exception) -> None:
            if isinstance(error, Unmergeable) and not sharded:
                self._blamed(effect, error, failed)
            else:
                failed(format_error(error), ())

        checked = partial(self._checked, job, effect.verify, payloads, anchor)
        self._jobs.run(checked, ended, refused)

    def _checked(
        self,
        job: Callable[[list[Tensor]], T],
        verify: bool,
        payloads: list[Payload],
        anchor: Anchor,
    ) -> T | list[int]:
        """The result of the job; or the positions of damaged inputs, -1 for the anchor."""
        spoiled = _spoiled(payloads, anchor) if verify else []
        inputs = [payload.data_B for payload in payloads]
        try:
            return spoiled or job(inputs)
        except Unmergeable:
            spoiled = _spoiled(payloads, anchor)
            if spoiled:
                return spoiled
            if not payloads:
                raise  # merged slices do not tell which member is at fault
            raise blame(inputs, anchor) from None

    def _blamed(
        self,
        effect: ev.Measure | ev.Merge,
        error: Unmergeable,
        failed: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        """Report the payloads at fault. Without one, the anchor is at fault: fail this rank."""
        if not error.positions:
            rack, fragment, version = self._store.me.rack, effect.fragment, effect.version - 1
            where = f"rack {rack}, fragment {fragment}, version {version}"
            self._jobs.published.fail(
                Diverged(f"{where}: {error}. Load a checkpoint into all racks.")
            )
        failed(str(error), error.positions)


def _spoiled(payloads: list[Payload], anchor: Anchor) -> list[int]:
    """Positions of the inputs whose bits have changed in memory; -1 is the anchor."""
    bad = [
        i
        for i, payload in enumerate(payloads)
        if checksum_of(payload.data_B.numpy().data) != payload.checksum
    ]
    return bad if anchor.recomputed() == anchor.digest else [-1, *bad]


# ------------------------------------------------------------------ slices


class Slicing:
    """Performs FetchSlice, MergeSlice and FreeSlices."""

    def __init__(self, store: TensorStore, jobs: Jobs) -> None:
        self._store, self._jobs = store, jobs

    def fetch(self, effect: ev.FetchSlice) -> None:
        store, fragment, key = self._store, effect.fragment, effect.key
        rules = store.rules[fragment]
        attempt = store.attempt(key, effect.count)
        if effect.seq:
            begin, end = _bytes(rules.numerics, attempt, effect.position)
            part_B = rules.numerics.buffers.empty(end - begin, torch.uint8, locked=False)
            extent = Extent(begin, rules.payload_bytes)
            at = store.offer_key((effect.member, fragment, effect.seq))
        else:
            part_B = attempt.merged(effect.position).view(torch.uint8)
            extent = Extent(0, part_B.numel())
            at = store.slice_key(key, effect.position)

        def done(error: Exception | None) -> None:
            store.pulls.end(effect.member.rack, meter, whole=error is None)
            if error is None and effect.seq:
                attempt.parts[effect.member.rack, effect.position] = part_B
            rack, size = effect.member.rack, part_B.numel()
            self._jobs.tell(ev.SliceFetched(*key, rack, effect.seq, format_error(error), size))

        meter = store.pulls.begin(effect.member.rack, part_B.numel())
        if part_B.numel():
            store.host.fetch(effect.holders, at, "", part_B.numpy().data, done, extent, meter)
        else:
            done(None)

    def merge(self, effect: ev.MergeSlice) -> None:
        store, numerics = self._store, self._store.rules[effect.fragment].numerics
        key, position = effect.key, effect.position
        attempt = store.attempt(key, effect.count)
        begin, end = _bytes(numerics, attempt, position)
        inputs = [
            store.payloads[member, effect.fragment, seq].data_B[begin:end]
            if member == store.member
            else attempt.parts.pop((member.rack, position))
            for member, seq in effect.members
        ]
        out_n = attempt.merged(position)

        def job() -> float | None:
            numerics.merge_slice(inputs, effect.weights, out_n)
            return numerics.compare(inputs, out_n.numel())

        def done(cosine: float | None) -> None:
            numerics.agreement = numerics.agreement.with_cosine(cosine, len(inputs))
            store.put_slice(key, position, attempt)
            self._jobs.tell(ev.SliceMerged(*key))

        def failed(error: Exception) -> None:
            self._jobs.tell(ev.SliceMerged(*key, format_error(error)))

        self._jobs.run(job, done, failed)

    def free(self, effect: ev.FreeSlices) -> None:
        self._store.free_attempt(effect.key)


def _bytes(numerics: Numerics, attempt: Attempt, position: int) -> tuple[int, int]:
    """Where a slice lies in a payload, in bytes."""
    return numerics.slice_bytes(attempt.cuts[position], attempt.cuts[position + 1])
