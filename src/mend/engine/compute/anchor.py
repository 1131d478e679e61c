"""One version of a fragment part, as a rank holds it. Never written to once it is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mend.codec import Codec, FragmentCodec
from mend.engine.compute.digest import bytes_of, digest_of_proof, proof_of
from mend.errors import ensure, require


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """A committed (or tentative) fragment part: N values, N of each state vector of the outer
    optimizer, then the state of its codec."""

    data: Tensor
    numel: int
    version: int
    digest: str
    rounds: int = 0
    """Rounds merged so far, in parts of `weights.WHOLE`."""
    codecs: FragmentCodec | None = None
    """None: nothing is encoded against this anchor."""
    proof: bytes = b""
    """What `digest` is the sha256 of; see `StateDigest.proof`."""

    @property
    def values(self) -> Tensor:
        return self.data[: self.numel]

    @property
    def states(self) -> tuple[Tensor, ...]:
        """State vectors of the outer optimizer, N each, in the order of its names."""
        end = self.data.numel() - self.codec_numel
        return self.data[self.numel : end].view(-1, self.numel).unbind() if end > self.numel else ()

    @property
    def codec_numel(self) -> int:
        return self.codecs.state_numel if self.codecs is not None else 0

    @property
    def payload_bytes(self) -> int:
        """Maximum size of an offer against this anchor."""
        return self.known_codecs.payload_bytes

    @property
    def codec_state(self) -> Tensor:
        return self.data[self.data.numel() - self.codec_numel :]

    @property
    def codec(self) -> Codec:
        """The codec of offers against this anchor. A new one each time, as it caches what it has
        read."""
        return self.known_codecs.at(self.codec_state, self.version)

    @property
    def known_codecs(self) -> FragmentCodec:
        """`codecs`, where something is encoded against this anchor."""
        return require(self.codecs, "this version is only a number here", version=self.version)

    def of_base(self, base: int) -> Anchor:
        """An older anchor, of which only the version and the codec state are left."""
        return Anchor(self.codec_state, 0, base, "", codecs=self.codecs)

    def recomputed(self) -> str:
        """The digest of the current bits."""
        return digest_of_proof(self.proven())

    def proven(self) -> bytes:
        """The proof of the digest of the current bits."""
        return proof_of(self.data, self.numel, self.version, self.rounds, self.codec_numel)

    def view(self) -> memoryview:
        """The bytes that a donor serves."""
        return bytes_of(self.data)


def check_buffer(data: Tensor, size: int) -> None:
    """Raise InvariantError unless `data` is a contiguous fp32 vector of `size` elements."""
    layout = (tuple(data.shape), data.dtype, data.is_contiguous())
    ensure(layout == ((size,), torch.float32, True), "no anchor buffer", size=size, layout=layout)
