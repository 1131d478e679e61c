"""Checks whether payloads can be merged, and finds the one that cannot. Runs on workers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mend.codec import Codec, Varying
from mend.consensus.records import NORM_MAX
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.vectors import block_numel, blocks, first_unsound, magnitude
from mend.errors import Unmergeable, WireError


def check_payloads(codec: Codec, payloads: Sequence[Tensor], numel: int) -> None:
    """Raises WireError for a payload of another size, Unmergeable for one that a codec of varying
    sizes cannot read."""
    if isinstance(codec, Varying):
        if any(_misfit(codec, payload, numel) for payload in payloads):
            raise Unmergeable("", ())
        return
    expected = codec.payload_bytes(numel)
    for position, payload in enumerate(payloads):
        if payload.numel() != expected:
            raise WireError(
                f"payload {position} has {payload.numel()} bytes, {codec.name}: {expected}"
            )


def _misfit(codec: Varying, payload_B: Tensor, numel: int) -> str:
    """Why this codec cannot read the payload, or empty."""
    try:
        codec.check(payload_B, numel)
    except WireError as error:
        return str(error)
    return ""


def blame(payloads: Sequence[Tensor], anchor: Anchor) -> Unmergeable:
    """The error of a `merge` that gave NaN or Inf although the checksums of its inputs are right.
    It names the payloads that contain NaN or Inf, or else the longest one; no payload if the
    anchor itself contains them."""
    numel = anchor.numel
    if first_unsound(anchor.values) is not None:
        return Unmergeable("the anchor itself holds no numbers", ())
    room_n = torch.empty(min(block_numel(), numel), dtype=torch.float32, device="cpu")
    codec = anchor.codec
    if isinstance(codec, Varying):
        misfits = [_misfit(codec, payload, numel) for payload in payloads]
        if wrong := tuple(i for i, misfit in enumerate(misfits) if misfit):
            return Unmergeable(misfits[wrong[0]], wrong)
    norms = []
    for payload in payloads:
        norm = 0.0
        for start, stop in blocks(numel, block_numel()):
            part = magnitude(codec.decode(payload, start, stop, room_n[: stop - start]))
            norm = max(norm, math.inf if math.isnan(part) else part)
        norms.append(norm)
    guilty = tuple(i for i, norm in enumerate(norms) if not norm < NORM_MAX)
    if guilty:
        listed = ", ".join(f"{norms[i]:g}" for i in guilty)
        return Unmergeable(f"its payload holds NaN, Inf or magnitudes of {listed}", guilty)
    longest = max(range(len(norms)), key=lambda i: (norms[i], -i))
    text = f"merging it leaves the range of fp32; its greatest magnitude is {norms[longest]:g}"
    return Unmergeable(text, (longest,))
