"""Measures whether merged racks moved in the same direction: the cosine of their deltas on a
sample. For reports; no bit of a merge depends on it. Runs on workers and the loop.

Legend: M members of a merge, n elements of the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from mend.codec import Codec

SAMPLE_NUMEL = 1 << 16
"""Elements of a rank's part, from its middle."""
APART = -0.3
"""Threshold for the mean of c (M - 1), where c is the cosine of M racks' deltas. The minimum is -1:
the racks undo each other's steps. In small problems, two racks whose optima are .3 of their length
apart have -.5 to -1; with rows of one distribution no value is below 0 (docs/internals/LOG.md)."""
COMPARED_MIN = 20
"""Compared merges before `apart` may be true."""


class Agreement(NamedTuple):
    """Sums over the merges of weights that a rank has computed."""

    merges: int = 0
    compared: int = 0
    cosines: float = 0.0
    relative: float = 0.0
    """Sum of c (M - 1): cosines relative to the magnitude of their minimum."""

    def merged(self) -> Agreement:
        return self._replace(merges=self.merges + 1)

    def with_cosine(self, cosine: float | None, members: int) -> Agreement:
        """None: nothing was compared."""
        if cosine is None:
            return self
        return self._replace(
            compared=self.compared + 1,
            cosines=self.cosines + cosine,
            relative=self.relative + cosine * (members - 1),
        )

    @property
    def apart(self) -> bool:
        """Whether the racks undo each other's steps."""
        return self.compared >= COMPARED_MIN and self.relative <= APART * self.compared

    @property
    def cosine(self) -> float | None:
        """The mean cosine; None: nothing was compared."""
        return self.cosines / self.compared if self.compared else None


def cosine_of(codec: Codec, payloads: Sequence[Tensor], numel: int) -> float | None:
    """The mean cosine over all pairs of members' deltas on the sample; None where fewer than two
    members have moved there."""
    import torch  # a witness counts progress without it

    from mend.engine.compute.merge_pass import decoding
    from mend.kernels import ROW_NUMEL

    size = min(SAMPLE_NUMEL, numel)
    if not size or len(payloads) < 2:
        return None
    start = (numel - size) // 2 // ROW_NUMEL * ROW_NUMEL
    deltas = decoding(codec, payloads, size)(start, start + size)
    units = [delta / length for delta in deltas if (length := float(delta.norm())) > 0]
    if len(units) < 2:
        return None
    together = float(torch.stack(units).sum(0).square().sum())
    return (together - len(units)) / (len(units) * (len(units) - 1))
