"""Digests that prove two racks hold the same bits. Runs on workers."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import xxhash
from torch import Tensor

from mend.errors import ChecksumMismatch, ensure
from mend.kernels import finish_hashes

DIGEST_BLOCK_BYTES = 4 << 20
_HEADER = struct.Struct("!8sQQB")  # magic, version, numel, state vectors
_ROUNDS = struct.Struct("!Q")
_CODEC = struct.Struct("!5sQ")
_HASH_BYTES = 16


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return tensor.view(torch.uint8).numpy().data.toreadonly()


class _BlockHashes:
    """xxh3_128 of every 4 MiB of a byte stream that is fed in pieces of any size."""

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

    def take(self, lanes_D8: np.ndarray, data: memoryview) -> None:
        """Feed whole blocks whose lanes a kernel has filled, and the bytes after them."""
        self._check_end()
        if len(lanes_D8):
            self._done.append(finish_hashes(lanes_D8, DIGEST_BLOCK_BYTES))
        self.feed(data[len(lanes_D8) * DIGEST_BLOCK_BYTES :])

    def finish(self) -> bytes:
        self._end()
        return b"".join(self._done)

    def extend(self, rest: _BlockHashes) -> None:
        """Append the blocks of the next part. This part ends at the end of a block."""
        self._check_end()
        rest._end()
        self._done += rest._done

    def _check_end(self) -> None:
        whole = self._room == DIGEST_BLOCK_BYTES
        ensure(whole, "a part is not cut at the end of a block", room=self._room)

    def _end(self) -> None:
        if self._room < DIGEST_BLOCK_BYTES:
            self._close()

    def _close(self) -> None:
        self._done.append(self._open.digest())
        self._open, self._room = xxhash.xxh3_128(), DIGEST_BLOCK_BYTES


class StateDigest:
    """sha256 over a header, the xxh3_128 of every 4 MiB of the values, of each of the outer
    optimizer's `states` vectors, of the codec's state.

    The header has the number of merged rounds if there is an outer state, and the length of the
    codec's state (`codec_numel`) if there is one.

    Detects accidents, not adversaries. Values and states are cut separately, so that all can be fed
    as they are computed.
    """

    def __init__(
        self, numel: int, version: int, states: int = 0, rounds: int = 0, codec_numel: int = 0
    ) -> None:
        states = states if numel else 0
        self._header = _HEADER.pack(b"mend-st1", version, numel, states)
        self._header += _ROUNDS.pack(rounds) if states else b""
        self._header += _CODEC.pack(b"codec", codec_numel) if codec_numel else b""
        self._vectors = [_BlockHashes() for _ in range(1 + states)]
        self._codec = _BlockHashes()

    def feed(self, values_n: Tensor, states_n: Sequence[Tensor] = ()) -> None:
        for hashes, each_n in zip(self._vectors, (values_n, *states_n), strict=True):
            hashes.feed(bytes_of(each_n))

    def take(self, lanes_VD8: np.ndarray, values_n: Tensor, states_n: Sequence[Tensor]) -> None:
        """The same after a `MergeKernel`, which has filled the lanes of D whole blocks of each
        vector."""
        lanes, vectors = lanes_VD8[: len(self._vectors)], (values_n, *states_n)
        for hashes, lanes_D8, each_n in zip(self._vectors, lanes, vectors, strict=True):
            hashes.take(lanes_D8, bytes_of(each_n))

    def feed_codec(self, state_S: Tensor) -> None:
        self._codec.feed(bytes_of(state_S))

    def extend(self, rest: StateDigest) -> None:
        """Append the digest of the elements that follow; the parts so far are whole blocks."""
        for hashes, those in zip(self._vectors, rest._vectors, strict=True):
            hashes.extend(those)

    def proof(self) -> bytes:
        """The bytes whose sha256 is the digest: the header and the hash of every block. A reader
        that has only the values can compare them with the digest by these."""
        hashes = (each.finish() for each in (*self._vectors, self._codec))
        return self._header + b"".join(hashes)

    def hexdigest(self) -> str:
        return digest_of_proof(self.proof())


def digest_of_proof(proof: bytes) -> str:
    return hashlib.sha256(proof).hexdigest()


def blocks_in(proof: bytes, digest: str, numel: int, version: int) -> list[bytes]:
    """The xxh3_128 of every DIGEST_BLOCK_BYTES of the N = numel values (fp32), from the proof of a
    digest. Raises ChecksumMismatch for a proof of another digest, length or version."""
    if digest_of_proof(proof) != digest:
        raise ChecksumMismatch(f"a proof of {digest_of_proof(proof)}; the log has digest {digest}")
    _, of, count, states = _HEADER.unpack_from(proof)
    if (of, count) != (version, numel):
        raise ChecksumMismatch(
            f"version {of} of {count} elements has the digest of version {version}, of which the "
            f"layout has {numel}"
        )
    at = _HEADER.size + (_ROUNDS.size if states else 0)
    at += _CODEC.size if (len(proof) - at) % _HASH_BYTES else 0
    blocks = -(-4 * numel // DIGEST_BLOCK_BYTES)
    return [proof[i : i + _HASH_BYTES] for i in range(at, at + _HASH_BYTES * blocks, _HASH_BYTES)]


def digests_of_tensors(values_N: Tensor, cuts: Sequence[int]) -> bytes:
    """xxh3_64 of each tensor [cuts[i], cuts[i + 1]), concatenated. Where two digests of the whole
    differ, these tell which tensor does."""
    data = bytes_of(values_N)
    spans = pairwise(4 * cut for cut in cuts)
    return b"".join(xxhash.xxh3_64_digest(data[begin:end]) for begin, end in spans)


def digest_of(data: Tensor, numel: int, version: int, rounds: int = 0, codec_numel: int = 0) -> str:
    """Digest of an anchor, as in `proof_of`."""
    return digest_of_proof(proof_of(data, numel, version, rounds, codec_numel))


def proof_of(
    data: Tensor, numel: int, version: int, rounds: int = 0, codec_numel: int = 0
) -> bytes:
    """Proof of the digest of an anchor. `data`: fp32, N = numel values, N of each vector of outer
    state, then `codec_numel` of the codec's. `rounds`: merged so far, in parts of
    `weights.WHOLE`."""
    end = data.numel() - codec_numel
    digest = StateDigest(numel, version, end // numel - 1 if numel else 0, rounds, codec_numel)
    if numel:
        values, *states = data[:end].view(-1, numel).unbind()
        digest.feed(values, states)
    digest.feed_codec(data[end:])
    return digest.proof()


def digest_of_state(data_B: Tensor) -> str:
    """xxh3_128 of the bytes of a tensor: the checksum that the lane verifies."""
    state_hash = xxhash.xxh3_128()
    # Before version 4 the functions of one call hold the interpreter's lock, unlike `update`.
    state_hash.update(bytes_of(data_B))
    return state_hash.hexdigest()
