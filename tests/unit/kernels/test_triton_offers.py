"""The kernels of offers have the bits of the host. On a GPU; without one in Triton's interpreter,
where Triton is installed:

    TRITON_INTERPRET=1 python -m pytest tests/unit/kernels/test_triton_offers.py
"""

from __future__ import annotations

import os

import pytest
import torch

from mend.codec import codec_named
from mend.codec.on_device import ON_DEVICE, device_encoder
from mend.consensus.records import NORM_MAX
from mend.engine.compute.numerics import Numerics
from mend.merge import MERGES
from mend.outer import Nesterov
from tests.unit.codec.offer_reference import offers

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

pytestmark = [
    pytest.mark.gpu if not INTERPRETED else pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SIZES = (1, 31, 128, 4096, 4097, 5000, 1_000_003)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().view(torch.int32)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(
    ("name", "in_weights"), [*((name, False) for name in ON_DEVICE), ("topk", True)]
)
def test_an_offer_has_the_bits_of_the_host(name: str, in_weights: bool, numel: int) -> None:
    codec = codec_named(name)
    host = Numerics(codec, MERGES["mean"](), Nesterov(1.0, 0.0), in_weights=in_weights)
    encoder = device_encoder(codec, in_weights)
    for what, anchor_N, snapshot_N, residual_N in offers(numel):
        residual_N = None if in_weights else residual_N
        delta_N = snapshot_N.clone()
        made = host.encode(delta_N, residual_N, anchor_N)
        given = (snapshot_N.clone(), anchor_N, residual_N)
        there = [each.to(DEVICE) if each is not None else None for each in given]
        left_N, parcel_B = encoder.encode(*there)
        found = encoder.read(parcel_B.cpu(), numel, NORM_MAX)
        assert torch.equal(found.payload, made.payload), what
        theirs_N = made.sent if in_weights else made.pend
        assert theirs_N is not None
        assert torch.equal(bits(left_N), bits(theirs_N)), what
        assert torch.equal(bits(there[0]), bits(delta_N)), what
        assert (found.bad, found.norm) == (None, made.norm), what
        assert found.unsent == pytest.approx(made.unsent, rel=1e-4, abs=1e-18), what
        assert found.length == pytest.approx(made.length, rel=1e-4, abs=1e-18), what


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -NORM_MAX])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_nan_inf_or_huge_value_is_located_in_its_block(name: str, value: float) -> None:
    encoder = device_encoder(codec_named(name))
    snapshot_N, anchor_N = torch.zeros(9000, device=DEVICE), torch.ones(9000, device=DEVICE)
    snapshot_N[4100] = value
    _, parcel_B = encoder.encode(snapshot_N, anchor_N, None)
    assert encoder.read(parcel_B.cpu(), 9000, NORM_MAX).bad == 4096
