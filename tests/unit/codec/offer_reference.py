"""What a kernel of offers has to write, by the codec of the host; and offers to try it with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mend.codec import Codec
from mend.kernels import ROW_NUMEL, DeviceOfferKernel


def reference(codec: Codec, in_weights: bool = False) -> DeviceOfferKernel:
    def run(
        delta_N: Tensor,
        anchor_N: Tensor,
        residual_N: Tensor | None,
        left_N: Tensor,
        payload_B: Tensor,
        found_4G: Tensor,
    ) -> None:
        torch.sub(anchor_N, delta_N, out=delta_N)
        x_N = delta_N if residual_N is None else delta_N + residual_N
        payload_B.copy_(codec.encode(x_N))
        sent_N = codec.decode(payload_B, 0, x_N.numel(), torch.empty_like(x_N))
        torch.sub(x_N, sent_N, out=left_N)
        for column, start in enumerate(range(0, x_N.numel(), ROW_NUMEL)):
            x_n, left_n = (each[start : start + ROW_NUMEL] for each in (x_N, left_N))
            sums = (x_n.abs().max(), left_n.abs().max(), left_n.dot(left_n), x_n.dot(x_n))
            found_4G[:, column] = torch.stack(sums)
        if in_weights:
            left_N.copy_(sent_N)

    return run


def noise(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    """Blocks of very different lengths, with zeros of both signs and subnormals."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-6, 1, numel // 300 + 1).repeat(300)[:numel]
    values = rng.standard_normal(numel) * sizes * scale
    drawn = rng.random(numel)
    values[drawn < 0.1] = 0.0
    values[drawn < 0.05] = -0.0
    values[drawn > 0.97] *= 1e-40
    values[drawn > 0.99] *= 1e42
    return torch.from_numpy(values.astype(np.float32))


def offers(numel: int) -> list[tuple[str, Tensor, Tensor, Tensor | None]]:
    """(what it is, anchor, snapshot, residual). One begins inside a tile with what is 0."""
    anchor_N, drift_N = noise(numel, 1), noise(numel, 2, 1e-3)
    zero_N, still_N = torch.zeros(numel), anchor_N.clone()
    still_N[numel // 3 :] -= drift_N[numel // 3 :]
    return [
        ("first", anchor_N, anchor_N - drift_N, None),
        ("owing", anchor_N, anchor_N - drift_N, noise(numel, 3, 1e-4)),
        ("tiny", zero_N, noise(numel, 4, 1e-36), None),
        ("at the least that is sent", zero_N, torch.full((numel,), 2.0**-100), None),
        ("below it", zero_N, torch.full((numel,), 2.0**-101), noise(numel, 5, 1e-38)),
        ("zeros", -zero_N, zero_N, -zero_N),
        ("halves", zero_N, torch.arange(numel) % 255 / 2 - 64, None),
        ("in part", anchor_N, still_N, zero_N),
        ("alike", zero_N, torch.arange(numel) // 7 % 5 - 2.0, None),
        ("few", zero_N, -1.5 * (torch.arange(numel) % 131 == 5), None),
    ]
