"""Merges: payloads in, one anchor out. Runs on the loop; a worker touches the elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from mend.coordination import events as ev
from mend.engine.digest import digests_of_tensors
from mend.engine.numerics import Anchor
from mend.engine.sums import Tensors, factors_in
from mend.errors import Diverged, MendError, Unmergeable
from mend.transport.bulk_wire import checksum_of

if TYPE_CHECKING:
    from mend.engine.concurrent_outer_step import ConcurrentOuterStep

T = TypeVar("T")


class Merging:
    """Performs Measure, Sum and Merge. `tensors`: of every fragment, where they lie."""

    def __init__(self, rank: ConcurrentOuterStep, tensors: Sequence[Tensors]) -> None:
        self._rank, self._numerics, self._tensors = rank, rank.numerics, tensors

    def measure(self, effect: ev.Measure) -> None:
        key = (effect.fragment, effect.version, effect.attempt)
        anchor = self._rank.anchors[(effect.fragment, effect.version - 1)]
        tensors = self._tensors[effect.fragment]

        def job(payloads: list[Tensor]) -> bytes:
            return self._numerics.measure(payloads, effect.weights, tensors, anchor)

        self._work(
            effect,
            job,
            lambda blob: self._rank.tell(ev.Measured(*key, blob)),
            lambda error, _: self._rank.tell(ev.Measured(*key, b"", error)),
        )

    def sum(self, effect: ev.Sum, tell: Callable[[ev.Event], None]) -> None:
        """For the leader: `tell` reaches it."""
        key = (effect.fragment, effect.version, effect.attempt)

        def done(result: bytes | Exception) -> None:
            if isinstance(result, MendError):
                tell(ev.Summed(*key, b"", error=said(result)))
            elif isinstance(result, Exception):
                self._rank.broken(result)
            else:
                tell(ev.Summed(*key, result))

        self._rank.host.work(lambda: self._numerics.total(effect.partials), done)

    def merge(self, effect: ev.Merge) -> None:
        key = (effect.fragment, effect.version, effect.attempt)
        anchor = self._rank.anchors[(effect.fragment, effect.version - 1)]
        tensors = self._tensors[effect.fragment]

        numerics = self._rank.numerics_of[effect.fragment]
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
                made = numerics.merge(
                    payloads, effect.weights, anchor, version,
                    runs=runs, part=effect.part, rates=rates,
                )  # fmt: skip
            else:
                made = numerics.finish(merged_N, anchor, version, effect.part, rates)
            taped = self._rank.tape is not None
            return made, digests_of_tensors(made.values, tensors.cuts) if taped else b""

        def done(result: tuple[Anchor, bytes]) -> None:
            made, each = result
            self._rank.tentative[key] = made
            self._rank.tell(ev.Merged(*key, made.digest, tensors=each))

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
        """Do `job` with the payloads, when they are what they were if the effect asks for it.

        `failed` is told which of them must not be merged; before any is blamed, all are compared
        with their checksums: what was spoiled here is not its member's fault.
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

        rank.host.work(partial(self._checked, job, effect.verify, *inputs), ended)

    def _checked(
        self,
        job: Callable[[list[Tensor]], T],
        verify: bool,
        payloads: list[Tensor],
        checksums: list[str],
        anchor: Anchor,
    ) -> T | list[int]:
        """What the job gives; or which inputs are not what they were, -1 for the anchor."""
        spoiled = _spoiled(payloads, checksums, anchor) if verify else []
        try:
            return spoiled or job(payloads)
        except Unmergeable:
            spoiled = _spoiled(payloads, checksums, anchor)
            if spoiled:
                return spoiled
            if not payloads:
                raise  # of merged slices, which say nothing of their members
            raise self._numerics.blame(payloads, anchor) from None

    def _blamed(
        self,
        effect: ev.Measure | ev.Merge,
        found: Unmergeable,
        failed: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        rank = self._rank
        if not found.positions:
            where = f"rack {rank.me.rack}, fragment {effect.fragment}, version {effect.version - 1}"
            rank.published.fail(Diverged(f"{where}: {found}. Load a checkpoint into all racks."))
        failed(str(found), found.positions)


def _spoiled(payloads: list[Tensor], checksums: list[str], anchor: Anchor) -> list[int]:
    """After racks disagreed: positions of inputs whose bits have changed; -1 is the anchor."""
    bad = [
        i
        for i, (payload, checksum) in enumerate(zip(payloads, checksums, strict=True))
        if checksum_of(payload.numpy().data) != checksum
    ]
    return bad if anchor.recomputed() == anchor.digest else [-1, *bad]


def said(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}" if error is not None else ""
