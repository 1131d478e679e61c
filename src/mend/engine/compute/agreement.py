"""Whether merged racks went the same way: the cosine of their deltas on a sample. For reports; no
bit of a merge depends on it. Runs on workers and the loop.

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
"""Of c (M - 1), c the cosine of M racks' deltas: -1 is the least, where racks undo each other's
steps. In small problems two racks have -.5 to -1 that learn towards goals of their own, .3 of the
goals' length apart, and none below 0 with rows of one distribution (docs/internals/LOG.md)."""
COMPARED_MIN = 20
"""Merges before that is judged."""


class Agreement(NamedTuple):
    """Sums over the merges of weights that a rank has computed."""

    merges: int = 0
    compared: int = 0
    cosines: float = 0.0
    of_least: float = 0.0
    """Sum of c (M - 1)."""

    def merged(self) -> Agreement:
        return self._replace(merges=self.merges + 1)

    def with_cosine(self, cosine: float | None, members: int) -> Agreement:
        """None: nothing was compared."""
        if cosine is None:
            return self
        return self._replace(
            compared=self.compared + 1,
            cosines=self.cosines + cosine,
            of_least=self.of_least + cosine * (members - 1),
        )

    @property
    def apart(self) -> bool:
        """Whether the racks undo each other's steps."""
        return self.compared >= COMPARED_MIN and self.of_least <= APART * self.compared

    @property
    def cosine(self) -> float | None:
        """The mean."""
        return self.cosines / self.compared if self.compared else None


def cosine_of(codec: Codec, payloads: Sequence[Tensor], numel: int) -> float | None:
    """The mean cosine of two members' deltas on the sample; None where fewer than two members have
    moved there."""
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
