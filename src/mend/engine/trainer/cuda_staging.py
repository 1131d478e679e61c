"""Captures and applies on a GPU, on a side stream; the training thread only launches them.

The training thread calls everything but `prefetch`. That is called by the loop, which begins to
upload a new anchor as soon as it is published, if no other one waits on the device; otherwise the
anchor is uploaded when it is applied.

An upload is stretched over the time until training would wait for it, so that its rate stays low.
A copy at the full speed of the bus more than halves the speed of training that launches many small
kernels, as under FSDP2: the device reads its commands over the same bus
(benchmarks/results/overlap.md).

Where the device encodes, it keeps, of every fragment, the anchor that was applied last and the
residual, and of an open offer the delta and the pending residual. With feedback in the weights it
keeps no residual, and of an open offer the sent part in place of the pending residual.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mend.codec.on_device import DeviceEncoder
from mend.consensus.records import NORM_MAX
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.buffers import POOLED_BYTES_MIN
from mend.engine.compute.digest import digest_of_state
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.offers import EncodedOffer
from mend.engine.state.fragment_state import FragmentState
from mend.errors import NonFinite
from mend.fragment.apply import ApplyMode
from mend.fragment.device import Landed, Move, Side, Uploaded
from mend.kernels import ROW_NUMEL

UPLOAD_BYTES_PER_S = 6e9
"""Rate of an upload that has enough time: a sixth of what the bus of an H100 carries."""
UPLOAD_PIECE_NUMEL = 1 << 20
PAUSE_S_MIN = 2e-4
"""Where pauses between pieces would be shorter, all is uploaded at once."""


class CudaPin:
    """Page-locks memory for CUDA. Memory that cannot be locked is used as it is, with a warning:
    copies of it hold up the training thread."""

    def __init__(self) -> None:
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._locked: set[int] = set()
        self._warned = False

    def lock(self, address: int, size: int) -> None:
        portable = 1  # for every device of the process
        error = int(self._runtime.cudaHostRegister(address, size, portable))
        if error == 0:
            self._locked.add(address)
        elif not self._warned:
            self._warned = True
            warnings.warn(
                f"CUDA could not page-lock {size >> 20} MiB (error {error}): exchanges will hold "
                "up training; look at the memory limits of this process or container",
                stacklevel=2,
            )

    def unlock(self, address: int) -> None:
        if address in self._locked:
            self._locked.remove(address)
            self._runtime.cudaHostUnregister(address)


class CudaStaging:
    """The device's part of a rank. At most one uploaded anchor waits there for its apply."""

    def __init__(
        self, side: Side, numerics: Numerics, apply_mode: ApplyMode, blend_alpha: float
    ) -> None:
        self.side, self._buffers, self.encoder = side, numerics.buffers, numerics.on_device
        self.apply_mode, self._alpha = apply_mode, blend_alpha
        self._lock = threading.Lock()
        """Guards the side and `_waiting`."""
        self._waiting: tuple[int, Uploaded, threading.Event] | None = None
        """(fragment, upload, the event that ends the pauses between its pieces)."""
        self._anchors: dict[int, tuple[Anchor, Tensor]] = {}
        """By fragment, the anchor that is on the device, and its values there."""
        self._held: dict[int, int] = {}
        """By fragment, bytes on the device, without those of `_waiting`."""

    def snapshot(self, state: FragmentState) -> tuple[Tensor, Landed]:
        """(the owned elements on the host, fp32; a function that waits until they are there)."""
        out_N = self._buffers.empty(state.owned.numel)
        with self._lock:
            return out_N, self.side.snapshot(state.view, state.owned, out_N)

    def encode(
        self, encoder: DeviceEncoder, fragment: int, state: FragmentState
    ) -> tuple[Tensor, Callable[[], EncodedOffer]]:
        """(the delta on the device; a function that waits for the payload, for any thread)."""
        with self._lock:
            anchor_N = self._anchor(fragment, state)
            if state.residual_N is not None and state.residual_N.device != self.side.device:
                state.residual_N = self.side.fetch(state.residual_N)  # of a checkpoint
            owes, numel = state.residual_N is not None, state.owned.numel
            self._hold(fragment, 4 * (3 + owes) * numel)
            out_B = self._landing(encoder.parcel_bytes(numel))
            delta_N, left_N, landed = self.side.encode(
                state.view, state.owned, anchor_N, state.residual_N, encoder.encode, out_B
            )
        return delta_N, partial(_encoded, encoder, numel, landed, out_B, left_N)

    def _landing(self, size: int) -> Tensor:
        """Page-locked host memory of any size, so that a copy from the device is asynchronous."""
        if size < POOLED_BYTES_MIN and self.side.device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")
        return self._buffers.empty(size, torch.uint8)

    def _anchor(self, fragment: int, state: FragmentState) -> Tensor:
        """The values of the fragment's anchor, on the device."""
        kept = self._anchors.get(fragment)
        if kept is None or kept[0] is not state.anchor:  # the first, or one that was copied
            kept = state.anchor, self.side.fetch(state.anchor.values)
            self._anchors[fragment] = kept
        return kept[1]

    def _hold(self, fragment: int, size: int) -> None:
        self.side.held(size - self._held.get(fragment, 0))
        self._held[fragment] = size

    def prefetch(
        self, fragment: int, old: Anchor, offer: int, delta_N: Tensor | None, new: Anchor,
        left_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Begin the upload of an anchor that will be applied, in `left_s` or later. `old`: the
        anchor that is applied; `offer`, `delta_N`: as for `realign`. Any thread may call it:
        `realign` uses the upload only if it is of the move that is due by then."""
        old_N = old.values
        with self._lock:
            if self.encoder is not None:
                on_device = self._anchors.get(fragment)
                if on_device is None or on_device[0] is not old:
                    return  # the training thread uploads it at the apply point
                old_N = on_device[1]
            if self._waiting is not None:
                before, older, _ = self._waiting
                if before != fragment or older.move.version >= new.version:
                    return
                self._forget()
            move = Move(old.version, new.version, offer, self.apply_mode)
            uploaded = self.side.upload(move, old_N, delta_N, new.values)
            ended = threading.Event()
            self._waiting = fragment, uploaded, ended
            pieces = uploaded.next_N.numel() / UPLOAD_PIECE_NUMEL
            # Half of the time: a step may take less than the ones before it.
            pause_s = min(uploaded.bus_bytes / UPLOAD_BYTES_PER_S, left_s / 2) / max(1, pieces)
            if pieces <= 1 or pause_s < PAUSE_S_MIN:
                self.side.advance(uploaded, uploaded.next_N.numel())
                return
        bring = partial(self._bring, uploaded, pause_s, ended)
        # Where no thread can be started, the apply uploads the rest.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=bring, name="mend-upload", daemon=True).start()

    def _bring(self, uploaded: Uploaded, pause_s: float, ended: threading.Event) -> None:
        """Upload piece by piece. An apply that comes earlier uploads the rest."""
        while not ended.wait(pause_s):
            with self._lock:
                if not self.side.advance(uploaded, UPLOAD_PIECE_NUMEL):
                    return

    def uploading(self) -> int | None:
        """The fragment whose next anchor is in transfer to the device; None: none is."""
        with self._lock:
            if self._waiting is None:
                return None
            fragment, uploaded, _ = self._waiting
            return None if self.side.there(uploaded) else fragment

    def close(self) -> None:
        """Release the upload that waits. Call it when nothing is uploaded or applied any more."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        """Release the upload that waits, if there is one."""
        if self._waiting is not None:
            _, uploaded, ended = self._waiting
            ended.set()
            self.side.forget(uploaded)
            self._waiting = None

    def realign(
        self,
        fragment: int,
        state: FragmentState,
        offer: int,
        delta_N: Tensor | None,
        new: Anchor,
        out_N: Tensor | None,
    ) -> None:
        """Launch the move to the new anchor: of the model, or into `out_N` (on the device, fp32).
        `offer`: number of the own offer that the anchor has merged, and `delta_N` its merged part;
        0 and None: it has merged none."""
        move = Move(state.anchor.version, new.version, offer, self.apply_mode)
        with self._lock:
            uploaded = self._taken(fragment, move)
            if uploaded is None:
                encodes = self.encoder is not None
                old_N = self._anchor(fragment, state) if encodes else state.anchor.values
                uploaded = self.side.upload(move, old_N, delta_N, new.values)
            self.side.apply(state.view, state.owned, uploaded, self._alpha, out_N)
            if self.encoder is not None:
                self._anchors[fragment] = new, uploaded.next_N
                if delta_N is not None:  # named: it leaves a residual, or nothing
                    self._hold(fragment, 4 * (2 - self.encoder.in_weights) * state.owned.numel)

    def _taken(self, fragment: int, move: Move) -> Uploaded | None:
        """Take the upload that waits, if it is of this move; None: it is of an older or another
        move, or there is none."""
        if self._waiting is None or self._waiting[0] != fragment:
            return None
        _, uploaded, ended = self._waiting
        if uploaded.move != move:
            self._forget()
            return None
        ended.set()
        self._waiting = None
        return uploaded


def _encoded(
    encoder: DeviceEncoder, numel: int, landed: Landed, out_B: Tensor, left_N: Tensor
) -> EncodedOffer:
    """What `Numerics.encode` returns. Raises NonFinite as it does."""
    landed()
    found = encoder.read(out_B, numel, NORM_MAX)
    if found.bad is not None:
        raise NonFinite(
            f"one of the elements {found.bad} to {min(found.bad + ROW_NUMEL, numel) - 1} of the "
            f"delta is NaN or not below {NORM_MAX:g}: it is not offered. "
            "Look for a loss that is NaN or a learning rate that is too high."
        )
    return EncodedOffer(
        found.payload, digest_of_state(found.payload),
        None if encoder.in_weights else left_N, left_N if encoder.in_weights else None,
        found.norm, found.unsent, found.length,
    )  # fmt: skip
