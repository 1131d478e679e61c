"""Snapshot and apply for parameters on a GPU, beside the training stream.

Snapshots and applies run on one side stream per rank. Around each of them the training stream gets
two events and nothing else: one that the snapshot or apply waits for (the parameters are written),
and one that the next step waits for (the snapshot or apply is done with them). Bus transfers happen
before or after, hidden under the training steps: a snapshot goes to the host from a copy on the
device, and a new anchor is uploaded when it arrives, not when it is due. Uploads have their own
stream, because a snapshot that waited for an upload would delay the training stream. They are made
in pieces: while the bus is full, the device waits for the commands that training launches
(engine/trainer/cuda_staging.py). Uses no peers, clocks or files.

On the device, for the fragment concerned and only while it is in use: one fp32 vector for a
snapshot, two for an anchor that waits for its apply point. `encode` leaves two there, and needs two
that stay (engine/trainer/cuda_staging.py).

Legend: N elements of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mend.fragment.apply import ApplyMode
from mend.fragment.shards import local_of
from mend.fragment.view import FragmentView
from mend.types import Owned

_CHUNK_NUMEL = 1 << 24
"""Elements processed at once: twice 64 MiB of scratch for parameters that are not fp32."""

Landed = Callable[[], None]
"""Blocks the calling thread until a copy has arrived on the host."""


def device_of(parameters: Iterable[Tensor]) -> torch.device | None:
    """The one device that all of them are on; None if they are on several."""
    found = {local_of(parameter).device for parameter in parameters}
    return found.pop() if len(found) == 1 else None


def on_host(values_N: Tensor) -> Tensor:
    """The values in host memory. Blocks the calling thread, but none of the training streams."""
    if values_N.device.type == "cpu":
        return values_N
    device: Any = torch.get_device_module(values_N.device)
    with device.stream(device.Stream(values_N.device)):
        return values_N.cpu()


Encode = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(snapshot, which becomes the delta; anchor; residual) -> (what is left out of the offer; the
bytes for the host), all on the device."""


class Move(NamedTuple):
    """A move of the model from one anchor to another, and which vectors it needs."""

    base: int
    """Version of the old anchor."""
    version: int
    """Version of the new one."""
    offer: int
    """seq of the own offer that the new anchor contains; 0: none."""
    apply_mode: ApplyMode


@dataclass(eq=False)
class Uploaded:
    """The vectors that an apply needs, on the device or in transfer to it."""

    move: Move
    next_N: Tensor
    base_N: Tensor | None
    """Vector to subtract from theta: the old anchor, or the captured snapshot; None: not needed."""
    sources: tuple[Tensor | None, Tensor | None, Tensor] | None
    """The needed parts of the old anchor, the delta and the new anchor, while pieces of them still
    have to be copied."""
    begun: int = 0
    """Number of elements that are on the device or in transfer."""
    ready: Any = None
    """Event after which all elements are on the device; None: some transfers have not begun."""

    @property
    def device_bytes(self) -> int:
        return 4 * (self.next_N.numel() + (self.base_N.numel() if self.base_N is not None else 0))

    @property
    def bus_bytes(self) -> int:
        """Bytes that are transferred over the bus."""
        needed = [each for each in self.sources or () if each is not None]
        return sum(each.nbytes for each in needed if each.device.type == "cpu")


class Side:
    """The side streams of one rank's device. One thread at a time may use it. `upload`, `advance`
    and `forget` make no CUDA call that is forbidden while another thread captures a graph."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._torch: Any = torch.get_device_module(device)
        # torch.cpu has streams and events that do nothing: the same code runs without a GPU.
        new_stream: Any = (
            torch.cpu.Stream if device.type == "cpu" else partial(self._torch.Stream, device)
        )
        self._stream, self._uploads = new_stream(), new_stream()
        self._flying: list[tuple[Any, tuple[Tensor, ...]]] = []
        self.bytes_peak = 0
        """Peak device memory in use."""
        self._waiting_bytes = 0

    def prepare(self, numels: Sequence[int], uploaded: Sequence[int]) -> None:
        """Reserve the memory that rounds will need in torch's allocator: vectors of these numbers
        of elements (fp32), and of these for uploads."""
        ready = []
        for stream, sizes in ((self._stream, numels), (self._uploads, uploaded)):
            with self._torch.stream(stream):
                ready += [torch.empty(n, dtype=torch.float32, device=self.device) for n in sizes]
        self._count(sum(each.nbytes for each in ready))
        del ready

    # -------------------------------------------------------------- capture

    @torch.no_grad()
    def snapshot(self, view: FragmentView, owned: Owned, out_N: Tensor) -> Landed:
        """Copy the owned elements to `out_N` (fp32, pinned); call the result before reading it."""
        main = self._begin()
        with self._torch.stream(self._stream):
            staged_N = torch.empty(owned.numel, dtype=torch.float32, device=self.device)
            view.read(owned, staged_N)
            self._end(main)
            out_N.copy_(staged_N, non_blocking=True)
            landed: Landed = self._mark(self._stream).synchronize
        self._count(4 * owned.numel)
        return landed

    @torch.no_grad()
    def encode(
        self,
        view: FragmentView,
        owned: Owned,
        anchor_N: Tensor,
        residual_N: Tensor | None,
        encode: Encode,
        out_B: Tensor,
    ) -> tuple[Tensor, Tensor, Landed]:
        """(delta, what is left out of the offer), of the owned elements and on the device, where
        `anchor_N` and `residual_N` are, and a call to be made before `out_B` (pinned) is read."""
        main = self._begin()
        with self._torch.stream(self._stream):
            delta_N = torch.empty(owned.numel, dtype=torch.float32, device=self.device)
            view.read(owned, delta_N)
            self._end(main)
            left_N, parcel_B = encode(delta_N, anchor_N, residual_N)
            out_B.copy_(parcel_B, non_blocking=True)
            landed: Landed = self._mark(self._stream).synchronize
        self._count(parcel_B.nbytes)
        return delta_N, left_N, landed

    @torch.no_grad()
    def fetch(self, values_N: Tensor) -> Tensor:
        """A copy on the device, for later use by the side stream."""
        with self._torch.stream(self._uploads):
            found_N = torch.empty(values_N.numel(), dtype=torch.float32, device=self.device)
            found_N.copy_(values_N, non_blocking=True)
            ready = self._lend(found_N)
        self._stream.wait_event(ready)
        self._keep(ready, (values_N,))
        return found_N

    def held(self, more: int) -> None:
        """Count bytes that stay on the device from now on; negative: that have been freed."""
        self._waiting_bytes += more
        self._count(0)

    # -------------------------------------------------------------- apply

    @torch.no_grad()
    def upload(
        self, move: Move, anchor_N: Tensor, delta_N: Tensor | None, next_N: Tensor
    ) -> Uploaded:
        """Make room on the device for a new anchor, which `advance` brings there. Tensors as those
        of `realign`, pinned, or on the device and complete."""
        based = delta_N is None or move.apply_mode == "carry"
        with self._torch.stream(self._uploads):
            there_N = torch.empty(next_N.numel(), dtype=torch.float32, device=self.device)
            base_N = torch.empty_like(there_N) if based else None
        sources = (anchor_N, delta_N, next_N) if based else (None, None, next_N)
        found = Uploaded(move, there_N, base_N, sources)
        self.held(found.device_bytes)
        return found

    @torch.no_grad()
    def advance(self, new: Uploaded, numel: int) -> bool:
        """Begin to copy the next elements, at most `numel`. Returns False if all copies have begun,
        or the upload was forgotten."""
        if new.sources is None:
            return False
        anchor_N, delta_N, next_N = new.sources
        piece = slice(new.begun, min(new.begun + numel, next_N.numel()))
        with self._torch.stream(self._uploads):
            there_n = new.next_N[piece]
            if new.base_N is not None and anchor_N is not None:
                base_n = new.base_N[piece].copy_(anchor_N[piece], non_blocking=True)
                if delta_N is not None:
                    base_n.sub_(there_n.copy_(delta_N[piece], non_blocking=True))
            there_n.copy_(next_N[piece], non_blocking=True)
        new.begun = piece.stop
        if new.begun < next_N.numel():
            return True
        new.ready = self._lend(new.next_N, new.base_N)
        self._end_upload(new, new.ready)
        return False

    def there(self, new: Uploaded) -> bool:
        """Whether all elements are on the device."""
        return new.ready is not None and bool(new.ready.query())

    @torch.no_grad()
    def apply(
        self,
        view: FragmentView,
        owned: Owned,
        new: Uploaded,
        alpha: float,
        out_N: Tensor | None = None,
    ) -> None:
        """Move the owned elements under the new anchor: in place, or to `out_N` (fp32, on the
        device) if replicas need the values. The formulas are those of `realign`."""
        self.advance(new, owned.numel)  # what is left of the upload
        main = self._begin()
        with self._torch.stream(self._stream):
            self._stream.wait_event(new.ready)
            for live, inner, outer in view.pieces(owned):
                plain = live.is_contiguous()
                flat = live.view(-1) if plain else live.reshape(-1)
                for start in range(0, outer.stop - outer.start, _CHUNK_NUMEL):
                    stop = min(start + _CHUNK_NUMEL, outer.stop - outer.start)
                    theta_n = flat[inner.start + start : inner.start + stop]
                    place = slice(outer.start + start, outer.start + stop)
                    in_place = out_N is None and theta_n.dtype == torch.float32
                    moved_n = theta_n if in_place else theta_n.to(torch.float32, copy=True)
                    _move(moved_n, new, place, alpha)
                    if not in_place:
                        (theta_n if out_N is None else out_N[place]).copy_(moved_n)
                if not plain and out_N is None:
                    live.copy_(flat.view(live.shape))
            self._end(main)
            # Release host memory that no copy reads any more.
            self._flying = [each for each in self._flying if not each[0].query()]
        self.forget(new)

    def forget(self, new: Uploaded) -> None:
        """Release an upload that is applied or no longer wanted. Call it once per upload."""
        self._waiting_bytes -= new.device_bytes
        if new.sources is not None:
            self._end_upload(new, self._mark(self._uploads))

    def close(self) -> None:
        """Wait until no copy reads or writes host memory any more."""
        for stream in (self._stream, self._uploads):
            self._mark(stream).synchronize()
        self._flying.clear()

    # -------------------------------------------------------------- streams

    def _begin(self) -> Any:
        """Make the side stream wait for the work queued on the training stream so far."""
        main = self._torch.current_stream(self.device)
        self._stream.wait_stream(main)
        return main

    def _end(self, main: Any) -> None:
        """Make the training stream wait for the work queued on the side stream so far."""
        main.wait_event(self._mark(self._stream))

    def _mark(self, stream: Any) -> Any:
        event = self._torch.Event()
        event.record(stream)
        return event

    def _lend(self, *uploaded: Tensor | None) -> Any:
        """Lend tensors to the side stream: return the event after which it may use them, and make
        the allocator wait for that stream before it reuses their memory."""
        if self.device.type != "cpu":
            for vector in uploaded:
                if vector is not None:
                    vector.record_stream(self._stream)
        return self._mark(self._uploads)

    def _end_upload(self, new: Uploaded, done: Any) -> None:
        """Record that no further piece will be copied."""
        sources, new.sources = new.sources, None
        if sources is not None:
            self._keep(done, tuple(each for each in sources if each is not None))

    def _keep(self, done: Any, sources: tuple[Tensor, ...]) -> None:
        """Keep host memory alive while a copy still reads it."""
        self._flying.append((done, sources))

    def _count(self, more: int) -> None:
        self.bytes_peak = max(self.bytes_peak, self._waiting_bytes + more)


def _move(theta_n: Tensor, new: Uploaded, place: slice, alpha: float) -> None:
    """`realign` on the device, in place: the same operations, each rounded to fp32. A sum of two
    has the same bits in either order."""
    next_n = new.next_N[place]
    if new.base_N is not None:
        theta_n.sub_(new.base_N[place]).add_(next_n)
    elif new.move.apply_mode == "overwrite":
        theta_n.copy_(next_n)
    else:
        theta_n.sub_(next_n).mul_(alpha).add_(next_n)
