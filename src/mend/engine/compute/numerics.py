"""Combines codec, merge rule and outer step. Runs on workers.

The bits do not depend on the size of a block or the number of threads: all operations are
element-wise, except checksums, which read the bytes in order, and exact sums.

Legend: N elements of a rank's part of a fragment, n elements of a block, B payload bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from mend.codec import CLOSING, CODECS, Codec, FragmentCodec, LayoutCodec, cut_numel, fragment_codec
from mend.codec.on_device import DeviceEncoder
from mend.consensus.weights import WHOLE
from mend.engine.compute.agreement import Agreement, cosine_of
from mend.engine.compute.anchor import Anchor, check_buffer
from mend.engine.compute.buffers import NO_SPARE, Buffers, Pin, Spare
from mend.engine.compute.digest import StateDigest, digest_of_proof
from mend.engine.compute.gram_pass import gram_kernel_for, grams_of
from mend.engine.compute.merge_pass import DIGEST_NUMEL, MergePass, kernel_for
from mend.engine.compute.offers import EncodedOffer, Read, compile_kernels, make_offer
from mend.engine.compute.payload_checks import check_payloads
from mend.engine.compute.signs import count_signs, kernel_of
from mend.engine.compute.sums import Tensors, Weights, partial_of, total_of
from mend.engine.compute.vectors import PORTION_NUMEL
from mend.engine.compute.worker_pool import WorkerPool
from mend.errors import Unmergeable, ensure, require
from mend.fragment.apply import ApplyMode
from mend.kernels import apply_kernel
from mend.merge import MERGES, Made, Measuring, Merge
from mend.outer import Nesterov, OuterOptimizer, Rates, Replace
from mend.transport.growth import Growth
from mend.types import Owned, Span, fp32

_FLOAT32, _MADE = CODECS["float32"](), Made()


def _owned(part: Owned | int) -> Owned:
    """The owned elements; a number stands for one tensor of so many elements."""
    return part if isinstance(part, Owned) else Owned((Span(0, part),), part)


def keeps_in_weights(codec: Codec | LayoutCodec, apply_mode: ApplyMode) -> bool:
    """Whether the error of the codec stays in the rack's weights. It cannot where an apply discards
    a part of the weights, as the error would be lost too."""
    return codec.feedback == "weights" and apply_mode == "carry"


class Numerics:
    """Codec, merge and outer step of one run. Any number of workers may share it. A part of a
    fragment is given as what the rank owns of it, or as its number of elements.

    `pool`: threads that share long jobs; every digest block is within one part. `buffers`: the
    large vectors that are kept from round to round. The training thread uses both.
    """

    def __init__(
        self,
        codec: Codec | LayoutCodec,
        merge: Merge,
        outer: OuterOptimizer,
        threads: int = 1,
        spare: Spare = NO_SPARE,
        pin: Pin | None = None,
        cores: frozenset[int] | None = None,
        staleness_max_rounds: int = 2,
        in_weights: bool = False,
        on_device: DeviceEncoder | None = None,
        racks: int = 1,
        shares: Numerics | None = None,
    ) -> None:
        """`threads`: of the pool, including the caller; they stay on `cores` (None: any). `spare`:
        vectors that are kept, page-locked by `pin` if it is set. `staleness_max_rounds`: greatest
        age of an offer that may be merged, in versions. `in_weights`: the error of the codec stays
        in the rack's weights, and no residual is kept. `on_device`: set where the GPU encodes
        captures. `racks`: number of racks of the job; an average of values over fewer of them goes
        only their share of the way. `shares`: the numerics whose buffers and pool these use; offers
        are then values, not differences to an anchor."""
        self.codec, self.rule, self.outer = codec, merge, outer
        self._staleness_max_rounds, self.in_weights = staleness_max_rounds, in_weights
        self._codecs: dict[Owned, FragmentCodec] = {}
        self.measuring = merge if isinstance(merge, Measuring) else None
        self.of_values = shares is not None
        self.spare, self.on_device, self.racks = spare, on_device, racks
        self.buffers: Buffers = (
            shares.buffers if shares is not None else Buffers(spare.vectors, pin)
        )
        self.pool: WorkerPool = shares.pool if shares is not None else WorkerPool(threads, cores)
        self.agreement = Agreement()
        """How far the racks agreed in the merges so far; the loop writes it."""

    def of(self, *, moments: bool) -> Numerics:
        """The numerics of fragments of weights: this object; or of moments and running statistics,
        whose values are averaged as fp32. Both share the buffers and the pool."""
        if not moments:
            return self
        return Numerics(
            _FLOAT32, MERGES["mean"](), Replace(), staleness_max_rounds=self._staleness_max_rounds,
            racks=self.racks, shares=self,
        )  # fmt: skip

    def close(self) -> list[str]:
        """End the threads and free the spare vectors; wait for a merge in flight. Returns the names
        of threads that still run after the limit."""
        self.buffers.close()
        return self.pool.close()

    def codecs(self, part: Owned | int) -> FragmentCodec:
        """The codec of a part; the first call compiles its kernels."""
        owned = _owned(part)
        if owned not in self._codecs:
            codecs = fragment_codec(self.codec, owned, self._staleness_max_rounds)
            compile_kernels(self.codec, owned.numel, offers=self.on_device is None)
            gram_kernel_for(self.rule, owned.numel)
            if owned.numel >= PORTION_NUMEL:
                apply_kernel()
            for plain in (self.codec, _FLOAT32):  # slices are merged and finished as fp32
                kernel_for(self.rule, self.outer, plain, owned.numel)
            if self.outer.states:
                kernel_of(self.codec, owned.numel)
            self._codecs.setdefault(owned, codecs)
        return self._codecs[owned]

    def payload_bytes(self, part: Owned | int) -> int:
        """Maximum size of a payload, except a closing one."""
        return self.codecs(part).payload_bytes

    def payload_bytes_max(self, part: Owned | int) -> int:
        """Maximum size of any payload."""
        size = self.payload_bytes(part)
        if self.codec.feedback == "buffer":
            return size
        return max(size, CLOSING.payload_bytes(_owned(part).numel))

    def _data_numel(self, part: Owned | int) -> int:
        return self._vectors * _owned(part).numel + self.codecs(part).state_numel

    @property
    def _vectors(self) -> int:
        """Number of vectors of an anchor: the values and the outer states."""
        return 1 + len(self.outer.states)

    def expect(self, parts: Sequence[Owned]) -> None:
        """Prepare the buffers for these parts: a new block that would be slightly smaller than the
        largest part needs is made as large, so that it can be used for every part."""
        largest = max(parts, key=lambda part: part.numel)
        numels = largest.numel, self._data_numel(largest)
        self.buffers.sizes = tuple(4 * numel for numel in numels)

    def empty(self, part: Owned | int, *, locked: bool = True) -> Tensor:
        """An unwritten anchor buffer: for a state pull, or for `merge(out=)`. `locked`: see
        `Buffers.empty`; `adopt` locks it later."""
        return self.buffers.empty(self._data_numel(part), locked=locked)

    def genesis(self, values_N: Tensor, owned: Owned | None = None) -> Anchor:
        """Version 0: a copy of the values, zero outer state, the first state of the codec."""
        return self.begun(lambda into_N: into_N.copy_(values_N), owned or _owned(values_N.numel()))

    def begun(self, read: Callable[[Tensor], object], part: Owned) -> Anchor:
        """Version 0 of values that `read` writes into the vector it is given. This saves a copy of
        the size of the model."""
        data = self.empty(part)
        read(data[: part.numel])
        return self.adopt_first(data, part)

    def adopt_first(self, data: Tensor, part: Owned) -> Anchor:
        """Version 0 in an anchor buffer of which only the values are filled."""
        codecs = self.codecs(part)
        data[part.numel :].zero_()
        codecs.first(data[data.numel() - codecs.state_numel :])
        return self.adopt(data, part, 0)

    def adopt(self, data: Tensor, part: Owned | int, version: int, rounds: int = 0) -> Anchor:
        """The anchor in a filled buffer. The caller compares its digest with the log's."""
        check_buffer(data, self._data_numel(part))
        self.buffers.lock(data)
        anchor = Anchor(data, _owned(part).numel, version, "", rounds, self.codecs(part))
        proof = anchor.proven()
        return replace(anchor, digest=digest_of_proof(proof), proof=proof)

    def encode(
        self,
        delta_N: Tensor,
        residual_N: Tensor | None,
        anchor_N: Tensor | None = None,
        codec: Codec | None = None,
        read: Read | None = None,
        grows: Callable[[Tensor], Growth] | None = None,
    ) -> EncodedOffer:
        """x = delta + residual; payload = C(x); pend = x - decode(payload), or with feedback in the
        weights sent = decode(payload).

        With `anchor_N`, `delta_N` is still a snapshot and becomes anchor - snapshot here. `codec`:
        that of the anchor; None: a codec without state. `read`: fills the snapshot on the way.
        `grows`: where the payload (uint8 B) is made from front to back, gets it before its first
        byte is there, and returns the `Growth` to report progress to. The payload may share the
        memory of `delta_N`. Raises NonFinite for NaN, Inf or a magnitude of NORM_MAX in x, or when
        x leaves the range of the codec; `delta_N` is undefined then.
        """
        codec = codec or self._stateless(delta_N.numel())
        vectors = delta_N, residual_N, anchor_N
        return make_offer(codec, *vectors, self.in_weights, self.buffers, self.pool, read, grows)

    def signs(self, payload_B: Tensor, anchor: Anchor) -> tuple[int, int]:
        """The number of elements of an offer against this anchor that have the sign of its outer
        momentum, and of those that have the opposite sign. (0, 0) without mend's momentum."""
        if not isinstance(self.outer, Nesterov) or not anchor.states or not anchor.rounds:
            return 0, 0
        return count_signs(anchor.codec, payload_B, anchor.states[0], self.pool)

    def measure(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        tensors: Tensors,
        anchor: Anchor | None = None,
    ) -> bytes:
        """The sums over this rank's part of the tensors, as bytes for the leader. `anchor`: that of
        the merge; only a codec with a state needs it. Raises WireError and Unmergeable for payloads
        as `merge` does."""
        rule, numel = self._measuring(), tensors.cuts[-1]
        codec = anchor.codec if anchor is not None else self._stateless(numel)
        check_payloads(codec, payloads, numel)
        grams = grams_of(rule, codec, payloads, tensors, self.pool)
        return partial_of(tuple(weights), grams)

    def total(self, partials: Sequence[bytes]) -> bytes:
        """The total of the partials of all ranks of a rack. Raises WireError for a bad partial."""
        return total_of(self._measuring(), partials)

    def _measuring(self) -> Measuring:
        return require(self.measuring, "this merge needs no sums", merge=self.rule.name)

    def merge(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        anchor: Anchor,
        version: int,
        out: Tensor | None = None,
        runs: Sequence[tuple[int, Weights]] | None = None,
        part: int = WHOLE,
        rates: Rates | None = None,
    ) -> Anchor:
        """The next anchor from the members' payloads, in the order given (ascending rack).

        `weights`: one float32 value per payload. `out`: a buffer of `empty` to reuse. `runs`:
        (end, weights) of stretches that have weights of their own. `part`: the share of a round
        that this merge is, in parts of WHOLE. `rates`: of the outer step; None: from the number of
        payloads. Raises WireError for a payload of another size, Unmergeable when an element of the
        result is NaN or not below NORM_MAX.
        """
        codecs, codec = anchor.known_codecs, anchor.codec
        data = self.buffers.empty(anchor.data.numel()) if out is None else out
        runs = runs or [(anchor.numel, tuple(weights))]
        _check_weights(runs, len(payloads), anchor.numel)
        self._check_data(anchor, data)
        check_payloads(codec, payloads, anchor.numel)
        after = anchor.rounds + part
        rates = rates or self.rates(anchor.rounds, part, len(payloads))
        merging = self._pass(self.rule, codec, payloads, runs, anchor, data, rates)
        digest = self._run(merging, anchor, version, after)
        if codecs.state_numel:
            state_S = data[data.numel() - codecs.state_numel :]
            codecs.advance(payloads, weights, anchor.codec_state, anchor.version, state_S)
            digest.feed_codec(state_S)
        proof = digest.proof()
        return Anchor(data, anchor.numel, version, digest_of_proof(proof), after, codecs, proof)

    def compare(self, payloads: Sequence[Tensor], anchor: Anchor | int) -> float | None:
        """The cosine of the members' deltas on a sample; None: there is nothing to compare.
        `anchor`: that of the merge, or for a slice its number of elements."""
        if self.of_values:
            return None
        if isinstance(anchor, int):
            return cosine_of(self._stateless(anchor), payloads, anchor)
        return cosine_of(anchor.codec, payloads, anchor.numel)

    def cuts(self, part: Owned | int, count: int) -> list[int]:
        """The `count` + 1 borders of slices of a part, from 0. They lie between the units that the
        codec encodes, so that each slice of a payload is a payload itself."""
        numel = _owned(part).numel
        unit = cut_numel(self.codec)
        ensure(unit, "payloads of this codec are not cut", codec=self.codec.name)
        units = -(-numel // unit)
        return [min(units * i // count * unit, numel) for i in range(count + 1)]

    def slice_bytes(self, begin: int, end: int) -> tuple[int, int]:
        """Where the elements [begin, end) lie in a payload, in bytes. Both are values of `cuts`."""
        codec = self._stateless(end)
        return codec.payload_bytes(begin), codec.payload_bytes(end)

    def _stateless(self, numel: int) -> Codec:
        """The codec of a vector without an anchor. Only for a codec that keeps no state."""
        return self.codecs(numel).at(torch.empty(0, dtype=torch.float32, device="cpu"), 0)

    def merge_slice(
        self, payloads: Sequence[Tensor], weights: Sequence[float], out: Tensor
    ) -> None:
        """Merge the members' slices of a part into `out` (fp32), without the outer step.
        `payloads`: of the slices alone. Raises WireError for a payload of another size, Unmergeable
        where an element of `out` is NaN or not below NORM_MAX."""
        numel = out.numel()
        codec = self._stateless(numel)
        check_payloads(codec, payloads, numel)

        runs, rates = [(numel, tuple(weights))], Rates(1.0)
        merging = MergePass(self.rule, Replace(), codec, payloads, runs, rates, out, out)
        try:
            self.pool.each([partial(merging.run, *part, None) for part in self._parts(numel)])
        except Unmergeable:
            raise Unmergeable("a slice contains NaN or Inf", ()) from None

    def finish(
        self, merged_N: Tensor, anchor: Anchor, version: int, part: int, rates: Rates
    ) -> Anchor:
        """The rest of a `merge` whose slices are merged: the outer step and the digest."""
        ensure(not anchor.codec_numel, "a codec with a state needs all payloads")
        data, after = self.buffers.empty(anchor.data.numel()), anchor.rounds + part
        runs, merged_B = [(anchor.numel, (1.0,))], merged_N.view(torch.uint8)
        merging = self._pass(_MADE, _FLOAT32, [merged_B], runs, anchor, data, rates)
        proof = self._run(merging, anchor, version, after).proof()
        digest = digest_of_proof(proof)
        return Anchor(data, anchor.numel, version, digest, after, anchor.codecs, proof)

    def rates(
        self,
        rounds: int,
        part: int,
        members: int,
        closing: bool = False,
        stretch: float = 1.0,
        waits: bool = False,
    ) -> Rates:
        """Rates of the outer step after so many rounds; `rounds` and `part` are in parts of WHOLE.
        `closing`: the merge has only closing offers; its result is the mean of what the racks hold,
        which nothing stretches. `waits`: the momentum takes up the merged delta, but the step is
        made without it."""
        if self.of_values:
            return Rates(fp32(Fraction(min(members, self.racks), self.racks)))
        plain = closing or (members == 1 and part == WHOLE)
        rates = self.outer.rates(Fraction(rounds, WHOLE), Fraction(part, WHOLE), plain=plain)
        if waits:
            rates = rates._replace(momentum=0.0)
        return rates if closing else rates._replace(stretch=stretch)

    def _parts(self, numel: int) -> list[tuple[int, int]]:
        """[0, numel) in one contiguous part per thread, cut at the ends of digest blocks."""
        blocks = -(-numel // DIGEST_NUMEL)
        count = max(1, min(self.pool.threads, blocks))
        cuts = [min(blocks * i // count * DIGEST_NUMEL, numel) for i in range(count + 1)]
        return list(pairwise(cuts))

    def _pass(
        self,
        rule: Merge,
        codec: Codec,
        payloads: Sequence[Tensor],
        runs: Sequence[tuple[int, Weights]],
        anchor: Anchor,
        data: Tensor,
        rates: Rates,
    ) -> MergePass:
        """From `anchor` to the next one in `data`."""
        numel, old = anchor.numel, anchor.states
        new = data[numel : numel * self._vectors].view(-1, numel).unbind() if old else ()
        return MergePass(
            rule, self.outer, codec, payloads, runs, rates, anchor.values, data[:numel], old, new
        )

    def _run(self, merging: MergePass, anchor: Anchor, version: int, after: int) -> StateDigest:
        """Run a `_pass` on the pool; returns the digest without the state of the codec. `after`:
        the rounds merged including this one."""
        parts, states = self._parts(anchor.numel), len(self.outer.states)
        digests = [
            StateDigest(anchor.numel, version, states, after, anchor.codec_numel) for _ in parts
        ]
        self.pool.each(
            [
                partial(merging.run, *part, digest)
                for digest, part in zip(digests, parts, strict=True)
            ]
        )
        whole, *others = digests
        for rest in others:
            whole.extend(rest)
        return whole

    def _check_data(self, anchor: Anchor, data: Tensor) -> None:
        """Raise InvariantError unless the next anchor can be made in `data`."""
        size = self._vectors * anchor.numel + anchor.codec_numel
        check_buffer(anchor.data, size)
        check_buffer(data, size)
        fresh = size == 0 or data.data_ptr() != anchor.data.data_ptr()
        ensure(fresh, "an anchor would be overwritten", version=anchor.version)


def _check_weights(runs: Sequence[tuple[int, Weights]], payloads: int, numel: int) -> None:
    ensure(runs[-1][0] == numel, "weights for another length", end=runs[-1][0], numel=numel)
    for weights in {weights for _, weights in runs}:
        right = payloads == len(weights) > 0
        ensure(right, "not one weight per payload", payloads=payloads, weights=weights)
        for weight in weights:
            ensure(fp32(weight) == weight, "a weight that is not a float32", weight=weight)
