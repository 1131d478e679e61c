"""Parcels, and what is refused. The kernels: tests/unit/kernels/test_triton_offers.py."""

from __future__ import annotations

import sys

import pytest
import torch

from mend.codec import codec_named
from mend.codec.on_device import ON_DEVICE, DeviceEncoder, device_encoder, encoder_on
from mend.engine.compute.numerics import Numerics
from mend.errors import ConfigError
from mend.merge import MERGES
from mend.outer import Nesterov
from tests.unit.codec.offer_reference import offers, reference


@pytest.mark.parametrize("numel", [0, 1, 31, 4096, 9000])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_parcel_is_read_as_what_the_host_would_have_made(name: str, numel: int) -> None:
    codec = codec_named(name)
    numerics = Numerics(codec, MERGES["mean"](), Nesterov(1.0, 0.0))
    encoder = DeviceEncoder(codec, reference(codec))
    for _, anchor_N, snapshot_N, residual_N in offers(numel):
        made = numerics.encode(snapshot_N.clone(), residual_N, anchor_N)
        _, parcel_B = encoder.encode(snapshot_N.clone(), anchor_N, residual_N)
        assert parcel_B.numel() == encoder.parcel_bytes(numel)
        found = encoder.read(parcel_B, numel, 2.0**64)
        assert torch.equal(found.payload, made.payload)
        assert (found.norm, found.bad) == (made.norm, None)
        assert found.unsent == pytest.approx(made.unsent, rel=1e-5, abs=1e-18)
        assert found.length == pytest.approx(made.length, rel=1e-5, abs=1e-18)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -(2.0**64)])
def test_nan_inf_or_huge_value_is_located_in_its_block(value: float) -> None:
    codec = codec_named("int8")
    encoder = DeviceEncoder(codec, reference(codec))
    snapshot_N = torch.zeros(9000)
    snapshot_N[4100] = value
    _, parcel_B = encoder.encode(snapshot_N, torch.ones(9000), None)
    assert encoder.read(parcel_B, 9000, 2.0**64).bad == 4096


@pytest.mark.parametrize("name", ["float32", "powersgd-4", "sparse"])
def test_a_codec_without_a_kernel_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no kernel for codec='{name}'"):
        encoder_on(torch.device("cuda"), codec_named(name), False)


@pytest.mark.parametrize(
    ("device", "where"), [(torch.device("cpu"), "CPU"), (None, "several devices")]
)
def test_a_model_that_is_not_on_one_gpu_is_refused(device: torch.device | None, where: str) -> None:
    with pytest.raises(ConfigError, match=f"a model on one GPU; this one is on .*{where}"):
        encoder_on(device, codec_named("int8"), False)


def test_encoder_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "mend.kernels.triton_offers", raising=False)
    with pytest.raises(ConfigError, match="needs Triton"):
        device_encoder(codec_named("int8"))
