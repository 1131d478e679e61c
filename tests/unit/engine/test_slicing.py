"""Slices of a part: cut, merged one by one, finished together: the bits of one merge of all."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mend.codec import codec_named, cut_numel
from mend.consensus.weights import WHOLE
from mend.engine.compute.numerics import Numerics
from mend.errors import Unmergeable
from mend.merge import MERGES
from mend.outer import OUTERS

WEIGHTS = (0.25, 0.5, 0.125, 0.125)


def numerics(codec: str, threads: int = 1) -> Numerics:
    outer = OUTERS["nesterov"](0.7, 0.9, 0)
    return Numerics(codec_named(codec), MERGES["mean"](), outer, threads)


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4", "e3m0"])
@pytest.mark.parametrize("numel", [0, 1, 5, 129, 70_001])
@pytest.mark.parametrize("count", [3, 4])
def test_the_bits_are_those_of_a_merge_of_all(codec: str, numel: int, count: int) -> None:
    made, chance = numerics(codec), torch.Generator().manual_seed(numel + count)
    anchor = made.genesis(torch.randn(numel, generator=chance))
    deltas = [torch.randn(numel, generator=chance) for _ in WEIGHTS]
    payloads = [made.encode(delta, None).payload.clone() for delta in deltas]
    cuts, merged_N = made.cuts(numel, count), torch.full((numel,), torch.nan)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, numel, count + 1)
    assert cuts == sorted(cuts)
    for first, last in pairwise(cuts):
        begin, end = made.slice_bytes(first, last)
        made.merge_slice([p[begin:end] for p in payloads], WEIGHTS, merged_N[first:last])
    whole = made.merge(payloads, WEIGHTS, anchor, 1)
    found = made.finish(merged_N, anchor, 1, WHOLE, made.rates(0, WHOLE, len(WEIGHTS)))
    assert found.digest == whole.digest
    assert torch.equal(found.data, whole.data)
    later = [made.merge(payloads, WEIGHTS, each, 2).digest for each in (whole, found)]
    assert later[0] == later[1], "and it is an anchor like any other"


@pytest.mark.parametrize("codec", ["topk", "sparse", "powersgd-2"])
def test_payloads_that_are_read_as_a_whole_are_not_cut(codec: str) -> None:
    assert cut_numel(codec_named(codec)) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_slice_that_is_no_numbers_is_not_served(value: float) -> None:
    made = numerics("float32")
    bad, out = torch.ones(1000), torch.empty(1000)
    bad[700] = value
    payloads = [torch.ones(1000).view(torch.uint8), bad.view(torch.uint8)]
    with pytest.raises(Unmergeable):
        made.merge_slice(payloads, (0.5, 0.5), out)
