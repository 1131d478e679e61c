"""The one place where codec, merge and outer step meet. Runs on workers.

Everything is element-wise and done block by block, so that a block stays in the cache from decoding
to its digest. Bits do not depend on the size of a block or the number of threads; nothing here
reduces over elements but the checksums, which read bytes in order, and sums that are exact.

Legend: N elements of a rank's part of a fragment, n elements of a block, B payload bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from mend.codec import (
    CLOSING,
    CODECS,
    Codec,
    FragmentCodec,
    LayoutCodec,
    Varying,
    cut_numel,
    fragment_codec,
)
from mend.codec.on_device import DeviceEncoder
from mend.consensus.records import NORM_MAX
from mend.consensus.weights import WHOLE
from mend.engine.buffers import Buffers, Pin
from mend.engine.digest import DIGEST_BLOCK_BYTES, StateDigest, bytes_of, digest_of
from mend.engine.offers import Encoded, compile_kernels, make_offer
from mend.engine.sums import Tensors, Weights, partial_of, total_of
from mend.engine.vectors import PORTION_NUMEL, block_numel, blocks, first_unsound, magnitude, sound
from mend.engine.worker_pool import WorkerPool
from mend.errors import Unmergeable, WireError
from mend.fragment.apply import Alignment
from mend.merge import MERGES, PIECE_NUMEL_MAX, Gram, Made, Measuring, Merge, nothing
from mend.outer import OuterOptimizer, Rates, Replace
from mend.types import Owned, Span, fp32

_FLOAT32, _MADE = CODECS["float32"](), Made()

_DIGEST_NUMEL = DIGEST_BLOCK_BYTES // 4


def _stretches(
    runs: Sequence[tuple[int, Weights]], begin: int, end: int, size: int
) -> Iterator[tuple[int, int, Weights]]:
    """Blocks of [begin, end), cut where the weights change."""
    start = 0
    for stop, weights in runs:
        first, last = max(start, begin), min(stop, end)
        for low, high in blocks(last - first, size):
            yield first + low, first + high, weights
        start = stop


def _misfit(codec: Varying, payload_B: Tensor, numel: int) -> str:
    """Why this codec cannot read the payload, or empty."""
    try:
        codec.check(payload_B, numel)
    except WireError as error:
        return str(error)
    return ""


def _check_buffer(data: Tensor, size: int) -> None:
    found = (tuple(data.shape), data.dtype, data.is_contiguous())
    assert found == ((size,), torch.float32, True), f"no anchor buffer of {size}: {found}"


def _owned(part: Owned | int) -> Owned:
    """A number of elements: of one tensor without a shape."""
    return part if isinstance(part, Owned) else Owned((Span(0, part),), part)


def keeps_in_weights(codec: Codec | LayoutCodec, alignment: Alignment) -> bool:
    """Whether what the codec leaves out of offers stays in the rack's weights. Not where an apply
    gives up a part of the weights, which would be lost with it."""
    return codec.feedback == "weights" and alignment == "carry"


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """A committed (or tentative) fragment part: N values, N of each state vector of the outer
    optimizer, then the state of its codec. Never written to."""

    data: Tensor
    numel: int
    version: int
    digest: str
    rounds: int = 0
    """That it has behind it, in parts of `weights.WHOLE`."""
    codecs: FragmentCodec | None = None
    """None: of an anchor that nothing is encoded against."""

    @property
    def values(self) -> Tensor:
        return self.data[: self.numel]

    @property
    def states(self) -> tuple[Tensor, ...]:
        """Of the outer optimizer, N each, in the order of its names."""
        end = self.data.numel() - self.codec_numel
        return self.data[self.numel : end].view(-1, self.numel).unbind() if end > self.numel else ()

    @property
    def codec_numel(self) -> int:
        return self.codecs.state_numel if self.codecs is not None else 0

    @property
    def payload_bytes(self) -> int:
        """The most that an offer against it can be."""
        assert self.codecs is not None, f"version {self.version} is only a number here"
        return self.codecs.payload_bytes

    @property
    def codec_state(self) -> Tensor:
        return self.data[self.data.numel() - self.codec_numel :]

    @property
    def codec(self) -> Codec:
        """Encodes offers against this anchor, decodes those that a merge into the next one names.
        A new one each time: it keeps what it has read."""
        assert self.codecs is not None, f"version {self.version} is only a number here"
        return self.codecs.at(self.codec_state, self.version)

    def of_base(self, base: int) -> Anchor:
        """An older one, of which nothing is left but the number and what encodes against it."""
        return Anchor(self.codec_state, 0, base, "", codecs=self.codecs)

    def recomputed(self) -> str:
        """The digest that its bits have now."""
        return digest_of(self.data, self.numel, self.version, self.rounds, self.codec_numel)

    def view(self) -> memoryview:
        """The bytes a donor serves."""
        return bytes_of(self.data)


class Numerics:
    """codec + merge + outer step of one run. Any number of workers may share it. A part of a
    fragment is named by what the rank owns of it, or by the number of its elements.

    `max_age`: how many versions old an offer may be and still be merged. `pool`: threads that share
    what is long; the bits do not depend on how many, as every operation is element-wise and every
    digest block lies in one part. `buffers`: `spare` large vectors are kept from round to round.
    The training thread uses both. `in_weights`: what the codec leaves out of an offer stays in the
    rack's weights; no residual is kept.
    """

    def __init__(
        self,
        codec: Codec | LayoutCodec,
        merge: Merge,
        outer: OuterOptimizer,
        threads: int = 1,
        spare: int = 0,
        pin: Pin | None = None,
        cores: frozenset[int] | None = None,
        max_age: int = 2,
        in_weights: bool = False,
    ) -> None:
        self.codec, self.rule, self.outer = codec, merge, outer
        self._max_age, self.in_weights = max_age, in_weights
        self._codecs: dict[Owned, FragmentCodec] = {}
        self.measuring = merge if isinstance(merge, Measuring) else None
        self.buffers, self.pool = Buffers(spare, pin), WorkerPool(threads, cores)
        self.of_values = False
        """Whether offers are values, and not what they are away from an anchor."""
        self.on_device: DeviceEncoder | None = None
        """Where the GPU encodes what is captured on it."""

    def of(self, *, moments: bool) -> Numerics:
        """These, or those of `for_moments`."""
        return self.for_moments() if moments else self

    def for_moments(self) -> Numerics:
        """Of fragments of moments: their values are averaged, as fp32. Shares memory and helping
        hands."""
        made = copy(self)
        made.codec, made.rule, made.outer = CODECS["float32"](), MERGES["mean"](), Replace()
        made.measuring, made._codecs, made.of_values = None, {}, True
        made.on_device = None
        return made

    def close(self) -> list[str]:
        """End the threads, give up the spare vectors; a merge in flight finishes first, if it can.
        Returns the names of threads that did not."""
        self.buffers.close()
        return self.pool.close()

    def codecs(self, part: Owned | int) -> FragmentCodec:
        owned = _owned(part)
        found = self._codecs.get(owned)
        if found is None:
            made = fragment_codec(self.codec, owned, self._max_age)
            # Now, and not in the first round.
            compile_kernels(self.codec, owned.numel, offers=self.on_device is None)
            found = self._codecs.setdefault(owned, made)
        return found

    def payload_bytes(self, part: Owned | int) -> int:
        """The most that a payload can be, but for a closing one."""
        return self.codecs(part).payload_bytes

    def payload_bytes_max(self, part: Owned | int) -> int:
        """The most that any payload can be."""
        size = self.payload_bytes(part)
        if self.codec.feedback == "buffer":
            return size
        return max(size, CLOSING.payload_bytes(_owned(part).numel))

    def _data_numel(self, part: Owned | int) -> int:
        return self._vectors * _owned(part).numel + self.codecs(part).state_numel

    @property
    def _vectors(self) -> int:
        """Of an anchor: its values and the outer states."""
        return 1 + len(self.outer.states)

    def empty(self, part: Owned | int) -> Tensor:
        """An unwritten anchor buffer: for a state pull, or for `merge(out=)`."""
        return self.buffers.empty(self._data_numel(part))

    def genesis(self, values_N: Tensor, owned: Owned | None = None) -> Anchor:
        """Version 0: a copy of the values, zero outer state, the first state of the codec."""
        return self.begun(lambda into_N: into_N.copy_(values_N), owned or _owned(values_N.numel()))

    def begun(self, read: Callable[[Tensor], object], part: Owned) -> Anchor:
        """`genesis` of values that `read` writes into the vector it is given: a copy of its own
        would be the size of the model, and fresh memory costs more than the copying."""
        numel, codecs = part.numel, self.codecs(part)
        data = self.empty(part)
        read(data[:numel])
        data[numel:].zero_()
        codecs.first(data[data.numel() - codecs.state_numel :])
        return self.adopt(data, part, 0)

    def adopt(self, data: Tensor, part: Owned | int, version: int, rounds: int = 0) -> Anchor:
        """Take over a filled buffer. The caller compares the digest with the one in the log."""
        _check_buffer(data, self._data_numel(part))
        made = Anchor(data, _owned(part).numel, version, "", rounds, self.codecs(part))
        return replace(made, digest=made.recomputed())

    def encode(
        self,
        delta_N: Tensor,
        residual_N: Tensor | None,
        anchor_N: Tensor | None = None,
        codec: Codec | None = None,
    ) -> Encoded:
        """x = delta + residual; payload = C(x); pend = x - decode(payload), or with feedback in the
        weights sent = decode(payload).

        With `anchor_N`, `delta_N` is a snapshot still and becomes anchor - snapshot here. `codec`:
        that of the anchor it is against; None: the one that is the same for all. The
        payload may share the memory of `delta_N`. Raises NonFinite for NaN, Inf or a magnitude of
        NORM_MAX in x, or when x leaves the range of the codec; `delta_N` is of no use then.
        """
        codec = codec or self.codecs(delta_N.numel()).at(delta_N[:0], 0)
        vectors = delta_N, residual_N, anchor_N
        return make_offer(codec, *vectors, self.in_weights, self.buffers, self.pool)

    def measure(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        tensors: Tensors,
        anchor: Anchor | None = None,
    ) -> bytes:
        """The sums over this part of the tensors, for the leader. `anchor`: of the merge; needed by
        a codec with a state. Raises WireError like `merge`."""
        rule, numel = self.measuring, tensors.cuts[-1]
        assert rule is not None, f"{self.rule.name} needs no sums"
        none = torch.empty(0)
        codec = anchor.codec if anchor is not None else self.codecs(numel).at(none, 0)
        self._check_payloads(codec, payloads, numel)
        pieces = [
            (number, begin + first, begin + last)
            for number, (begin, end) in enumerate(tensors.measured)
            for first, last in blocks(end - begin, PORTION_NUMEL)
        ]
        found = [nothing(len(payloads))] * len(pieces)

        def job(position: int) -> None:
            _, start, stop = pieces[position]
            found[position] = self._measured(rule, codec, payloads, start, stop)

        self.pool.each([partial(job, position) for position in range(len(pieces))])
        grams = [nothing(len(payloads))] * len(tensors.measured)
        for (number, _, _), gram in zip(pieces, found, strict=True):
            grams[number] = grams[number].plus(gram)
        return partial_of(tuple(weights), grams)

    def _measured(
        self, rule: Measuring, codec: Codec, payloads: Sequence[Tensor], begin: int, end: int
    ) -> Gram:
        gram, size = nothing(len(payloads)), min(block_numel(), PIECE_NUMEL_MAX)
        rooms = [torch.empty(min(size, end - begin)) for _ in payloads]
        for first, last in blocks(end - begin, size):
            decoded = [
                codec.decode(payload, begin + first, begin + last, room[: last - first])
                for payload, room in zip(payloads, rooms, strict=True)
            ]
            gram = gram.plus(rule.measure(decoded))
        return gram

    def total(self, partials: Sequence[bytes]) -> bytes:
        """What the partials of all ranks of a rack come to. Raises WireError for garbage."""
        assert self.measuring is not None, f"{self.rule.name} needs no sums"
        return total_of(self.measuring, partials)

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

        `out` is a buffer of `empty(numel)` to reuse. `runs`: (end, weights) of stretches that have
        weights of their own. `part`: how much of a round it is, of WHOLE. `rates`: of the outer
        step, where more than the payloads says what they are. Raises WireError for a payload of
        another size, Unmergeable when an element of the result is no number below NORM_MAX.
        """
        codecs, codec = anchor.codecs, anchor.codec
        assert codecs is not None, "an anchor that is merged into has a codec"
        data = self.buffers.empty(anchor.data.numel()) if out is None else out
        runs = runs or [(anchor.numel, tuple(weights))]
        self._check(codec, payloads, runs, anchor, data)
        parts = self._parts(anchor.numel)
        after, states = anchor.rounds + part, len(self.outer.states)
        state_numel = codecs.state_numel
        digests = [StateDigest(anchor.numel, version, states, after, state_numel) for _ in parts]
        rates = rates or self.rates(anchor.rounds, part, len(payloads))
        span = partial(self._merge_span, codec, payloads, runs, anchor, data, rates)
        self.pool.each(
            [partial(span, digest, *part) for digest, part in zip(digests, parts, strict=True)]
        )
        for rest in digests[1:]:
            digests[0].extend(rest)
        state_S = data[data.numel() - state_numel :]
        if state_numel:
            codecs.advance(payloads, weights, anchor.codec_state, anchor.version, state_S)
            digests[0].feed_codec(state_S)
        return Anchor(data, anchor.numel, version, digests[0].hexdigest(), after, codecs)

    def cuts(self, part: Owned | int, count: int) -> list[int]:
        """Where `count` slices of a part end, from 0: at borders of what its codec encodes
        together, so that each slice of a payload is a payload."""
        numel = _owned(part).numel
        unit = cut_numel(self.codec)
        assert unit, f"payloads of {self.codec.name} are not cut"
        units = -(-numel // unit)
        return [min(units * i // count * unit, numel) for i in range(count + 1)]

    def slice_bytes(self, begin: int, end: int) -> tuple[int, int]:
        """Where the elements [begin, end) lie in a payload; both are of `cuts`."""
        codec = self.codecs(end).at(torch.empty(0), 0)
        return codec.payload_bytes(begin), codec.payload_bytes(end)

    def merge_slice(
        self, payloads: Sequence[Tensor], weights: Sequence[float], out: Tensor
    ) -> None:
        """What the members' slices of a part come to, without the outer step. `payloads`: of the
        slices alone. Raises Unmergeable when an element of `out` is no number below NORM_MAX."""
        numel = out.numel()
        codec = self.codecs(numel).at(out[:0], 0)
        self._check_payloads(codec, payloads, numel)

        def job(begin: int, end: int) -> None:
            rooms = [torch.empty(min(block_numel(), end - begin)) for _ in payloads]
            for first, last in blocks(end - begin, block_numel()):
                start, stop = begin + first, begin + last
                decoded = [
                    codec.decode(payload, start, stop, room[: stop - start])
                    for payload, room in zip(payloads, rooms, strict=True)
                ]
                self.rule.block(decoded, weights, out[start:stop])
                if not sound(out[start:stop]):
                    raise Unmergeable("a slice holds what is no number", ())

        self.pool.each([partial(job, *part) for part in self._parts(numel)])

    def finish(
        self, merged_N: Tensor, anchor: Anchor, version: int, part: int, rates: Rates
    ) -> Anchor:
        """`merge` of which the sum over the members is there: the outer step and the digest."""
        made = copy(self)
        made.codec, made.rule, made._codecs = _FLOAT32, _MADE, {}
        codecs = made.codecs(anchor.numel)
        assert not anchor.codec_numel, "a codec with a state needs all payloads"
        plain, merged_B = replace(anchor, codecs=codecs), merged_N.view(torch.uint8)
        found = made.merge([merged_B], [1.0], plain, version, part=part, rates=rates)
        return replace(found, codecs=anchor.codecs)

    def rates(
        self, rounds: int, part: int, members: int, closing: bool = False, stretch: float = 1.0
    ) -> Rates:
        """Of the outer step behind so many rounds; both in parts of WHOLE. `closing`: all that it
        merges are last offers. With feedback in the weights those hold what was left out of all
        former ones, too: how many steps they count does not say how long they are."""
        if closing and self.in_weights:
            stretch = 1.0
        plain = closing or (members == 1 and part == WHOLE)
        rates = self.outer.rates(Fraction(rounds, WHOLE), Fraction(part, WHOLE), plain=plain)
        return rates._replace(stretch=stretch)

    def merge_into(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        anchor: Anchor,
        data: Tensor,
        digest: StateDigest | None,
        block: int | None = None,
    ) -> None:
        """`merge` in the calling thread, without the bookkeeping: fills `data`, feeds `digest`
        block by block while it is in the cache."""
        runs = [(anchor.numel, tuple(weights))]
        codec = anchor.codec
        self._check(codec, payloads, runs, anchor, data)
        rates = self.rates(anchor.rounds, WHOLE, len(payloads))
        self._merge_span(codec, payloads, runs, anchor, data, rates, digest, 0, anchor.numel, block)

    def _parts(self, numel: int) -> list[tuple[int, int]]:
        """[0, numel) in one contiguous part per thread, cut at the ends of digest blocks."""
        blocks = -(-numel // _DIGEST_NUMEL)
        count = max(1, min(self.pool.threads, blocks))
        cuts = [min(blocks * i // count * _DIGEST_NUMEL, numel) for i in range(count + 1)]
        return list(pairwise(cuts))

    def _merge_span(
        self,
        codec: Codec,
        payloads: Sequence[Tensor],
        runs: Sequence[tuple[int, Weights]],
        anchor: Anchor,
        data: Tensor,
        rates: Rates,
        digest: StateDigest | None,
        begin: int,
        end: int,
        block: int | None = None,
    ) -> None:
        numel, size = anchor.numel, block or block_numel()
        old = anchor.states
        new = data[numel : numel * self._vectors].view(-1, numel).unbind() if old else ()
        delta_n = torch.empty(min(size, end - begin), dtype=torch.float32)
        scratch = [torch.empty_like(delta_n) for _ in payloads]
        for start, stop, weights in _stretches(runs, begin, end, size):
            merged = delta_n[: stop - start]
            decoded = [
                codec.decode(payload, start, stop, room[: stop - start])
                for payload, room in zip(payloads, scratch, strict=True)
            ]
            self.rule.block(decoded, weights, merged)
            values = data[start:stop]
            before, after = ([each[start:stop] for each in states] for states in (old, new))
            self.outer.block(anchor.data[start:stop], before, merged, values, after, rates)
            # Whatever is not finite in a payload is not finite here, as NaN and Inf survive every
            # product and sum: one look at the result is one at all that went into it.
            if not sound(values):
                raise Unmergeable("", ())
            if digest is not None:
                digest.feed(values, after)

    def _check(
        self,
        codec: Codec,
        payloads: Sequence[Tensor],
        runs: Sequence[tuple[int, Weights]],
        anchor: Anchor,
        data: Tensor,
    ) -> None:
        assert runs[-1][0] == anchor.numel, f"weights for {runs[-1][0]} of {anchor.numel} elements"
        for weights in {weights for _, weights in runs}:
            assert len(payloads) == len(weights) > 0, (
                f"{len(payloads)} payloads for {len(weights)} weights"
            )
            for weight in weights:
                assert fp32(weight) == weight, f"{weight=} is no float32"
        size = self._vectors * anchor.numel + anchor.codec_numel
        _check_buffer(anchor.data, size)
        _check_buffer(data, size)
        assert size == 0 or data.data_ptr() != anchor.data.data_ptr(), (
            "an anchor is never overwritten"
        )
        self._check_payloads(codec, payloads, anchor.numel)

    def _check_payloads(self, codec: Codec, payloads: Sequence[Tensor], numel: int) -> None:
        if isinstance(codec, Varying):
            if any(_misfit(codec, payload, numel) for payload in payloads):
                raise Unmergeable("", ())
            return
        expected = codec.payload_bytes(numel)
        for position, payload in enumerate(payloads):
            if payload.numel() != expected:
                raise WireError(
                    f"payload {position} has {payload.numel()} bytes, {codec.name}: {expected}"
                )

    def blame(self, payloads: Sequence[Tensor], anchor: Anchor) -> Unmergeable:
        """Why `merge` gave no numbers, though every payload has its checksum and the anchor its
        digest: payloads that hold no numbers, or else the longest. Nobody: the anchor itself."""
        numel = anchor.numel
        if first_unsound(anchor.values) is not None:
            return Unmergeable("the anchor itself holds no numbers", ())
        room_n, codec = torch.empty(min(block_numel(), numel), dtype=torch.float32), anchor.codec
        if isinstance(codec, Varying):
            misfits = [_misfit(codec, payload, numel) for payload in payloads]
            if wrong := tuple(i for i, misfit in enumerate(misfits) if misfit):
                return Unmergeable(misfits[wrong[0]], wrong)
        norms = []
        for payload in payloads:
            norm = 0.0
            for start, stop in blocks(numel, block_numel()):
                decoded = codec.decode(payload, start, stop, room_n[: stop - start])
                found = magnitude(decoded)
                norm = max(norm, found if found == found else math.inf)
            norms.append(norm)
        guilty = tuple(i for i, norm in enumerate(norms) if not norm < NORM_MAX)
        if guilty:
            said = ", ".join(f"{norms[i]:g}" for i in guilty)
            return Unmergeable(f"its payload holds NaN, Inf or magnitudes of {said}", guilty)
        longest = max(range(len(norms)), key=lambda i: (norms[i], -i))
        text = f"merging it leaves the range of fp32; its greatest magnitude is {norms[longest]:g}"
        return Unmergeable(text, (longest,))
