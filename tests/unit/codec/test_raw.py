"""Raw payloads: fp32 travels as it is, bfloat16 is rounded to nearest even, and bad bytes are
refused by type."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mend.codec import CODECS, RawBfloat16, RawFloat32
from mend.errors import WireError


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(
        (rng.standard_normal(numel) * 10.0 ** rng.integers(-20, 20, numel)).astype(np.float32)
    )


def rounded_to_nearest_even(x: torch.Tensor) -> np.ndarray:
    """The upper 16 bits after adding half of the last place, minus one if the last place is
    even."""
    bits = x.numpy().view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_fp32_is_exact_and_copies_nothing() -> None:
    x = noise(1000)
    payload = RawFloat32().encode(x)
    assert RawFloat32.exact
    assert payload.data_ptr() == x.data_ptr()
    assert torch.equal(RawFloat32().decode(payload, 0, 1000, torch.empty(1000)), x)


def test_bfloat16_rounds_to_nearest_and_ties_to_even() -> None:
    ties = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, -0x407F8000], dtype=torch.int32
    )
    x = torch.cat([ties.view(torch.float32), noise(100_003), torch.tensor([0.0, -0.0, 1e-42])])
    payload = RawBfloat16().encode(x)
    assert not RawBfloat16.exact
    assert np.array_equal(payload.numpy().view(np.uint16), rounded_to_nearest_even(x))


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_bytes_that_are_no_payload_are_a_wire_error(name: str) -> None:
    codec = CODECS[name]()
    payload = codec.encode(noise(10))
    for bad, stop in (
        (payload[:-1], 10),
        (payload, 11),
        (payload.float(), 10),
        (payload.view(2, -1), 10),
    ):
        with pytest.raises(WireError):
            codec.decode(bad, 0, stop, torch.empty(stop))
