"""Captures and applies on a GPU, on a side stream; the training thread only launches them.

Used by the training thread. A new anchor is uploaded as soon as it is decided, if no other one
waits on the device; else at its apply point.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from mend.engine.buffers import Buffers
from mend.engine.fragment_state import FragmentState
from mend.engine.numerics import Anchor
from mend.fragment.apply import Alignment
from mend.fragment.device import Landed, Side, Uploaded


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
    """The device's side of a rank: at most one anchor waits there."""

    def __init__(
        self, side: Side, buffers: Buffers, alignment: Alignment, blend_alpha: float
    ) -> None:
        self.side, self._buffers = side, buffers
        self.alignment, self._alpha = alignment, blend_alpha
        self._waiting: tuple[int, Uploaded] | None = None

    def snapshot(self, track: FragmentState) -> tuple[Tensor, Landed]:
        """The owned elements on the host (fp32), once the second value has been called."""
        out_N = self._buffers.empty(track.owned.numel)
        return out_N, self.side.snapshot(track.view, track.owned, out_N)

    def prefetch(
        self, fragment: int, track: FragmentState, delta_N: Tensor | None, new: Anchor
    ) -> None:
        """Begin the upload of an anchor that will be applied; `delta_N` as for `realign`."""
        if self._waiting is not None:
            before, older = self._waiting
            if before != fragment or older.version >= new.version:
                return
            self.side.forget(older)
        self._waiting = fragment, self._upload(track, delta_N, new)

    def realign(
        self,
        fragment: int,
        track: FragmentState,
        delta_N: Tensor | None,
        new: Anchor,
        out_N: Tensor | None,
    ) -> None:
        """Order the move under the new anchor: of the model, or into `out_N` (device, fp32)."""
        uploaded = self._taken(fragment, delta_N is not None, new.version)
        if uploaded is None:
            uploaded = self._upload(track, delta_N, new)
        self.side.apply(track.view, track.owned, uploaded, self.alignment, self._alpha, out_N)

    def _taken(self, fragment: int, named: bool, version: int) -> Uploaded | None:
        """What waits, if it is what is to be applied. It may be older, or have gone another way."""
        if self._waiting is None or self._waiting[0] != fragment:
            return None
        uploaded, self._waiting = self._waiting[1], None
        if (uploaded.version, uploaded.named) == (version, named):
            return uploaded
        self.side.forget(uploaded)
        return None

    def _upload(self, track: FragmentState, delta_N: Tensor | None, new: Anchor) -> Uploaded:
        return self.side.upload(
            new.version, track.anchor.values, delta_N, new.values, self.alignment
        )
