"""Reads and writes the live model for the training thread.

The methods that write are generators, as in `trainer_rounds`: ranks that hold copies of the same
elements exchange their slices first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mend.engine.compute.anchor import Anchor
from mend.engine.compute.digest import StateDigest
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.offers import EncodedOffer, Read
from mend.engine.compute.vectors import PORTION_NUMEL, first_unsound
from mend.engine.state.fragment_state import FragmentState, GatherSlices, OpenOffer, Requests
from mend.engine.trainer.cuda_staging import CudaStaging
from mend.fragment.apply import ApplyMode, realign
from mend.fragment.device import Landed, Side
from mend.fragment.moments import MomentsView
from mend.fragment.view import Pieces, between, portions
from mend.kernels import apply_kernel


class CapturedValues(NamedTuple):
    """What a capture has read (fp32). `read`: fills it later, while the offer is encoded; None: it
    is filled. `landed`, `encoding`: see `OpenOffer`."""

    values_N: Tensor
    read: Read | None = None
    landed: Landed | None = None
    encoding: Callable[[], EncodedOffer] | None = None


class ModelAccess:
    """The live model of one rank, fragment by fragment."""

    def __init__(
        self, numerics: Numerics, side: Side | None, apply_mode: ApplyMode, blend_alpha: float
    ) -> None:
        self._buffers, self._pool = numerics.buffers, numerics.pool
        self.apply_mode, self._alpha = apply_mode, blend_alpha
        self.staging = None
        """Set where the model is on a GPU."""
        if side is not None:
            self.staging = CudaStaging(side, numerics, apply_mode, blend_alpha)

    def carry_from_here(self) -> None:
        """Have every apply from now on keep all local progress in the weights, whatever apply_mode
        is."""
        self.apply_mode = "carry"
        if self.staging is not None:
            self.staging.apply_mode = "carry"

    # -------------------------------------------------------------- reading

    def read(self, state: FragmentState) -> Tensor:
        """A copy of what this rank owns, in fp32 on the host."""
        theta_N = self._buffers.empty(state.owned.numel)
        state.view.read(state.owned, theta_N)
        return theta_N

    def snapshot(
        self, fragment: int, state: FragmentState, *, closing: bool, waits: bool
    ) -> CapturedValues:
        """Read what this rank owns, for an offer. `waits`: training waits for the result anyway;
        the offer may then be encoded portion by portion, right behind the copy."""
        if self.staging is not None and state.moments is None:
            encoder = self.staging.encoder
            if encoder is not None and not (closing and encoder.in_weights):
                values_N, encoding = self.staging.encode(encoder, fragment, state)
                return CapturedValues(values_N, encoding=encoding)
            values_N, landed = self.staging.snapshot(state)
            return CapturedValues(values_N, landed=landed)
        values_N = self._buffers.empty(state.owned.numel)
        live = state.view.in_place(state.owned)
        if live is None:
            state.view.read(state.owned, values_N)
            return CapturedValues(values_N)

        def copy(pieces: Pieces) -> None:
            for theta_n, place in pieces:
                values_N[place].copy_(theta_n)

        if state.moments is None and waits:
            return CapturedValues(values_N, lambda begin, end: copy(between(live, begin, end)))
        self._pool.each([partial(copy, pieces) for pieces in portions(live, PORTION_NUMEL)])
        return CapturedValues(values_N)

    def unsound(self, state: FragmentState) -> str:
        """The first of this rank's weights that is NaN or not below NORM_MAX, in words; empty:
        there is none."""
        theta_N = self.read(state)
        first = first_unsound(theta_N)
        if first is None:
            return ""
        cuts, slots = state.owned.cuts, state.view.layout.slots
        slot = next(slot for slot, end in zip(slots, cuts[1:], strict=True) if first < end)
        return f"{slot.name} holds {theta_N[first].item()}"

    def digest(self, state: FragmentState) -> str:
        """The `digest_of` the weights, without a copy where they are fp32 on the CPU. Every part
        but the last is a whole number of blocks."""
        numel = state.owned.numel
        live = state.view.in_place(state.owned)
        if live is None:
            live = [(self.read(state), slice(0, numel))]
        parts = [(StateDigest(numel, 0), pieces) for pieces in portions(live, PORTION_NUMEL)]
        self._pool.each([partial(_feed, digest, pieces) for digest, pieces in parts])
        whole = StateDigest(numel, 0)
        for digest, _ in parts:
            whole.extend(digest)
        return whole.hexdigest()

    def distance(
        self, fragment_states: Sequence[FragmentState], anchors: Sequence[Anchor]
    ) -> float:
        """The distance of this rank's weights from the anchors, relative to the length of the
        anchors, in fp64."""
        apart = whole = 0.0
        for state, anchor in zip(fragment_states, anchors, strict=True):
            if state.in_model and state.moments is None and anchor.digest != state.anchor.digest:
                theta_N = self.read(state).sub_(anchor.values)
                apart += float(torch.linalg.vector_norm(theta_N, dtype=torch.float64)) ** 2
            whole += float(torch.linalg.vector_norm(anchor.values, dtype=torch.float64)) ** 2
        return float((apart / whole) ** 0.5 if whole else apart)

    # -------------------------------------------------------------- writing

    def realign(
        self, fragment: int, state: FragmentState, delta_N: Tensor | None, anchor: Anchor
    ) -> Requests:
        """Move the model to the new anchor; where it is fp32 on the CPU, in one pass. `delta_N`:
        the merged part of the own offer; None: the anchor has merged none."""
        if self.staging is not None:
            out_N = None
            if state.shared:
                numel, device = state.owned.numel, self.staging.side.device
                out_N = torch.empty(numel, dtype=torch.float32, device=device)
            seq = state.offer.seq if delta_N is not None and state.offer is not None else 0
            self.staging.realign(fragment, state, seq, delta_N, anchor, out_N)
            if out_N is not None:
                yield from self.write(fragment, state, out_N)
            return
        live, theta_N = None if state.shared else state.view.in_place(state.owned), None
        if live is None:
            theta_N = self.read(state)
            live = [(theta_N, slice(0, state.owned.numel))]
        move = partial(self._move, state.anchor.values, delta_N, anchor.values)
        parts = portions(live, PORTION_NUMEL)
        self._pool.each([partial(move, pieces) for pieces in parts], compiled=True)
        if theta_N is not None:
            yield from self.write(fragment, state, theta_N)

    def average(
        self, state: FragmentState, view: MomentsView, offer: OpenOffer, anchor: Anchor, steps: int
    ) -> Requests:
        """Write the mean that the racks agreed on, continued by the `steps` that this rank has made
        since its capture."""
        live_N = self.read(state)
        view.decay(state.owned, live_N, offer.delta_N, anchor.values, steps)
        yield from self.write(offer.fragment, state, live_N)

    def _move(self, old_N: Tensor, delta_N: Tensor | None, new_N: Tensor, pieces: Pieces) -> None:
        apply_mode, alpha = self.apply_mode, self._alpha
        kernel = apply_kernel() if new_N.numel() >= PORTION_NUMEL else None
        if delta_N is not None and apply_mode == "overwrite":
            kernel = None  # a copy
        for theta_n, place in pieces:
            delta_n = delta_N[place] if delta_N is not None else None
            if kernel is not None:
                given = (theta_n, old_N[place], new_N[:0] if delta_n is None else delta_n)
                theta, old, delta = (each.numpy() for each in given)
                kernel(theta, old, delta, new_N[place].numpy(), apply_mode == "blend", alpha)
                increment_version(theta_n)  # autograd and UncountedWrites look at it
                continue
            realign(theta_n, old_N[place], delta_n, new_N[place], apply_mode, alpha, theta_n)

    def write(self, fragment: int, state: FragmentState, slice_N: Tensor) -> Requests:
        """Write this rank's slice and, where it has replicas, their slices of the same tensors."""
        if state.shared:
            held_N = yield GatherSlices(fragment, slice_N, state.holding)
            state.view.write(state.holding.everything, held_N)
        else:
            state.view.write(state.owned, slice_N)


def _feed(digest: StateDigest, pieces: Pieces) -> None:
    for theta_n, _ in pieces:
        digest.feed(theta_n)
