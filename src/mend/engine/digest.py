"""Digests that prove two racks hold the same bits. Runs on workers."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import pairwise

import torch
import xxhash
from torch import Tensor

DIGEST_BLOCK_BYTES = 4 << 20
_HEADER = struct.Struct("!8sQQ?")  # magic, version, numel, has_state
_ROUNDS = struct.Struct("!Q")
_CODEC = struct.Struct("!5sQ")


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data.toreadonly()


class _BlockHashes:
    """xxh3_128 of every 4 MiB of a byte stream, fed in pieces of any size."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._open = xxhash.xxh3_128()
        self._room = DIGEST_BLOCK_BYTES

    def feed(self, data: memoryview) -> None:
        while len(data):
            piece, data = data[: self._room], data[self._room :]
            self._open.update(piece)
            self._room -= len(piece)
            if self._room == 0:
                self._close()

    def finish(self) -> bytes:
        self._end()
        return b"".join(self._done)

    def extend(self, rest: _BlockHashes) -> None:
        """Go on behind a part that was hashed elsewhere; this one ended at a block's end."""
        assert self._room == DIGEST_BLOCK_BYTES, "parts are cut at the ends of blocks"
        rest._end()
        self._done += rest._done

    def _end(self) -> None:
        if self._room < DIGEST_BLOCK_BYTES:
            self._close()

    def _close(self) -> None:
        self._done.append(self._open.digest())
        self._open, self._room = xxhash.xxh3_128(), DIGEST_BLOCK_BYTES


class StateDigest:
    """sha256 over a header, the xxh3_128 of every 4 MiB of the values, of the outer state, of the
    codec's state.

    The rounds merged so far are a part of the outer state, and in the header where there is one. So
    is the length of the codec's state (`codec_numel`).

    Detects accidents, not adversaries. Values and state are cut separately, so both can be fed as
    they are made.
    """

    def __init__(
        self, numel: int, version: int, has_state: bool, rounds: int = 0, codec_numel: int = 0
    ) -> None:
        has_state = has_state and numel > 0
        self._header = _HEADER.pack(b"mend-st1", version, numel, has_state)
        self._header += _ROUNDS.pack(rounds) if has_state else b""
        self._header += _CODEC.pack(b"codec", codec_numel) if codec_numel else b""
        self._values, self._state, self._codec = _BlockHashes(), _BlockHashes(), _BlockHashes()

    def feed(self, values_n: Tensor, state_n: Tensor | None) -> None:
        self._values.feed(bytes_of(values_n))
        if state_n is not None:
            self._state.feed(bytes_of(state_n))

    def feed_codec(self, state_S: Tensor) -> None:
        self._codec.feed(bytes_of(state_S))

    def extend(self, rest: StateDigest) -> None:
        """Append the digest of the elements that follow; the parts so far are whole blocks."""
        self._values.extend(rest._values)
        self._state.extend(rest._state)

    def hexdigest(self) -> str:
        return hashlib.sha256(
            self._header + self._values.finish() + self._state.finish() + self._codec.finish()
        ).hexdigest()


def digests_of_tensors(values_N: Tensor, cuts: Sequence[int]) -> bytes:
    """xxh3_64 of the values in [cuts[i], cuts[i + 1]), one behind the other: which tensor differs
    where the digest of the whole does."""
    data = bytes_of(values_N)
    spans = pairwise(4 * cut for cut in cuts)
    return b"".join(xxhash.xxh3_64_digest(data[begin:end]) for begin, end in spans)


def digest_of(data: Tensor, numel: int, version: int, rounds: int = 0, codec_numel: int = 0) -> str:
    """Digest of an anchor; `data`: fp32, N = numel values, N of outer state if there is any, then
    `codec_numel` of the codec's. `rounds`: that it has behind it, in parts of `weights.WHOLE`."""
    end = data.numel() - codec_numel
    has_state = end > numel
    digest = StateDigest(numel, version, has_state, rounds, codec_numel)
    digest.feed(data[:numel], data[numel:end] if has_state else None)
    digest.feed_codec(data[end:])
    return digest.hexdigest()


class StateHash:
    """xxh3_128 of the bytes of tensors end to end, as the lane checks it."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def feed(self, values_N: Tensor) -> None:
        """Contiguous, on the CPU."""
        view = bytes_of(values_N)
        for start in range(0, len(view), DIGEST_BLOCK_BYTES):
            self._hash.update(view[start : start + DIGEST_BLOCK_BYTES])

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def digest_of_state(data_B: Tensor) -> str:
    found = StateHash()
    found.feed(data_B)
    return found.hexdigest()
