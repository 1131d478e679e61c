"""One pass over the payloads of a merge that computes, per tensor, the sums from which a measuring
merge rule derives its factors. Runs on workers. The bits do not depend on blocks or threads: the
sums are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from mend.codec import Codec
from mend.engine.compute.merge_pass import decoding
from mend.engine.compute.sums import Tensors
from mend.engine.compute.vectors import PORTION_NUMEL, block_numel, blocks
from mend.engine.compute.worker_pool import WorkerPool
from mend.kernels import GramKernel, gram_kernel
from mend.merge import PIECE_NUMEL_MAX, Gram, Measuring, Merge, Radial, gram_by, nothing


def gram_kernel_for(rule: Merge, numel: int) -> GramKernel | None:
    """None where the rule is not mend's own, and for a short vector, as in `kernel_for`."""
    return gram_kernel() if type(rule) is Radial and numel >= PORTION_NUMEL else None


def grams_of(
    rule: Measuring, codec: Codec, payloads: Sequence[Tensor], tensors: Tensors, pool: WorkerPool
) -> list[Gram]:
    """The sums of each measured tensor."""
    pieces = [
        (number, begin + first, begin + last)
        for number, (begin, end) in enumerate(tensors.measured)
        for first, last in blocks(end - begin, PORTION_NUMEL)
    ]
    kernel = gram_kernel_for(rule, tensors.cuts[-1])
    measured = [nothing(len(payloads))] * len(pieces)

    def job(position: int) -> None:
        _, begin, end = pieces[position]
        measured[position] = _measured(rule, kernel, codec, payloads, begin, end)

    pool.each([partial(job, position) for position in range(len(pieces))])
    grams = [nothing(len(payloads))] * len(tensors.measured)
    for (number, _, _), gram in zip(pieces, measured, strict=True):
        grams[number] = grams[number].plus(gram)
    return grams


def _measured(
    rule: Measuring,
    kernel: GramKernel | None,
    codec: Codec,
    payloads: Sequence[Tensor],
    begin: int,
    end: int,
) -> Gram:
    gram, size = nothing(len(payloads)), min(block_numel(), PIECE_NUMEL_MAX)
    if kernel is not None and codec.exact:
        size = PORTION_NUMEL  # nothing is decoded
    decode = decoding(codec, payloads, min(size, end - begin))
    for first, last in blocks(end - begin, size):
        deltas = decode(begin + first, begin + last)
        gram = gram.plus(gram_by(kernel, deltas) if kernel else rule.measure(deltas))
    return gram
