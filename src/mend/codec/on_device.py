"""Encoding on the GPU that holds the weights, so that only payloads cross the bus.

One kernel makes an offer of snapshot, anchor and residual. The payload and its statistics lie in
one row of bytes, the parcel, so that one copy brings them to the host.

Legend: N elements of a rank's part of a fragment, B payload bytes, G programs of the kernel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mend.codec.base import Codec, LayoutCodec
from mend.errors import ConfigError, format_error
from mend.kernels import ROW_NUMEL, DeviceOfferKernel, device_offer_kernel

ON_DEVICE = ("bfloat16", "int8", "int4", "e3m0", "topk")
"""Codecs with such a kernel."""

MESSAGE_MAX = 400
"""Limit of the characters of a message of Triton."""

_ALIGNED = 16
"""The second part of a parcel begins at a multiple of this number of bytes."""


class ParcelContent(NamedTuple):
    """Content of a parcel. norm: the greatest magnitude in x. unsent, length: the lengths of what
    was left out and of x. bad: index of the first of ROW_NUMEL elements one of which is NaN or not
    below the limit; None: there is none."""

    payload: Tensor
    norm: float
    unsent: float
    length: float
    bad: int | None


class DeviceEncoder:
    """Encoder for one codec of ON_DEVICE. Its results equal those of the host to the bit.
    `in_weights`: see Numerics."""

    def __init__(self, codec: Codec, kernel: DeviceOfferKernel, in_weights: bool = False) -> None:
        self._codec, self._kernel, self.in_weights = codec, kernel, in_weights

    def parcel_bytes(self, numel: int) -> int:
        return self._found_at(numel) + 16 * _programs(numel)

    def encode(
        self, delta_N: Tensor, anchor_N: Tensor, residual_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(what is left out, or with feedback in the weights what is sent, N; parcel): new on the
        device, on its current stream. `delta_N` is the snapshot, and becomes the delta."""
        numel = delta_N.numel()
        left_N = delta_N.new_empty(ROW_NUMEL * _programs(numel))[:numel]
        parcel_B = torch.empty(self.parcel_bytes(numel), dtype=torch.uint8, device=delta_N.device)
        payload_B, found_4G = self._opened(parcel_B, numel)
        if numel:
            self._kernel(delta_N, anchor_N, residual_N, left_N, payload_B, found_4G)
        return left_N, parcel_B

    def read(self, parcel_B: Tensor, numel: int, limit: float) -> ParcelContent:
        """Read a parcel on the host."""
        payload_B, found_4G = self._opened(parcel_B, numel)
        peaks_G = torch.maximum(found_4G[0], found_4G[1])  # NaN if one of them is
        wrong = (~(peaks_G < limit)).nonzero()
        unsent, length = (math.sqrt(math.fsum(row.tolist())) for row in found_4G[2:])
        norm = float(found_4G[0].max()) if numel else 0.0
        bad = int(wrong[0]) * ROW_NUMEL if len(wrong) else None
        return ParcelContent(payload_B, norm, unsent, length, bad)

    def compile(self, device: torch.device) -> None:
        """Compile for this GPU now instead of in the first round. Raises ConfigError if that
        fails."""
        try:
            with torch.cuda.device(device):
                for numel in (16, 31):  # kernels differ by whether vectors divide the number
                    anchor_N = torch.ones(numel, device=device, dtype=torch.float32)
                    for residual_N in (None,) if self.in_weights else (None, anchor_N):
                        self.encode(torch.zeros_like(anchor_N), anchor_N, residual_N)
                torch.cuda.synchronize()
        except Exception as error:  # raised by Triton: no C compiler, an unknown driver
            message = " ".join(format_error(error).split())
            rule = f"cannot be used here, because Triton fails ({message[:MESSAGE_MAX]})"
            raise ConfigError("encode_on", "device", rule, "Use encode_on='host'.") from error

    def _found_at(self, numel: int) -> int:
        return -(-self._codec.payload_bytes(numel) // _ALIGNED) * _ALIGNED

    def _opened(self, parcel_B: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The payload, and its statistics."""
        found_B = parcel_B[self._found_at(numel) :]
        payload_B = parcel_B[: self._codec.payload_bytes(numel)]
        return payload_B, found_B.view(torch.float32).view(4, _programs(numel))


def encoder_on(
    device: torch.device | None, codec: Codec | LayoutCodec, in_weights: bool
) -> DeviceEncoder:
    """A compiled encoder. Raises ConfigError if offers cannot be encoded on this device."""
    if isinstance(codec, LayoutCodec):
        raise no_kernel(codec.name)
    if device is None or device.type != "cuda":
        where = "several devices" if device is None else f"the {device.type.upper()}"
        rule = f"needs a model on one GPU; this one is on {where}"
        raise ConfigError("encode_on", "device", rule, "Move it before mend_init, or use 'host'.")
    encoder = device_encoder(codec, in_weights)
    encoder.compile(device)
    return encoder


def device_encoder(codec: Codec, in_weights: bool = False) -> DeviceEncoder:
    """Raises ConfigError for a codec without a kernel, or without Triton."""
    if codec.name not in ON_DEVICE:
        raise no_kernel(codec.name)
    try:
        kernel = device_offer_kernel(codec.name, in_weights)
        return DeviceEncoder(codec, kernel, in_weights)
    except ImportError as error:
        rule = f"needs Triton ({error})"
        remedy = "Install a build of torch for CUDA, which brings it, or use encode_on='host'."
        raise ConfigError("encode_on", "device", rule, remedy) from error


def no_kernel(codec: str) -> ConfigError:
    rule = f"has no kernel for codec={codec!r}, only for {', '.join(ON_DEVICE)}"
    return ConfigError("encode_on", "device", rule, "Set codec to one of them, or use 'host'.")


def _programs(numel: int) -> int:
    return -(-numel // ROW_NUMEL)
