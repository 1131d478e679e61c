"""Where a training thread stands, as plain numbers: what a checkpoint has of it beside tensors."""

from __future__ import annotations

import msgspec


class FragmentProgress(msgspec.Struct, frozen=True):
    """Of one fragment on one rank. `digest`: of anchor and outer state; `weights`: of the model's
    weights (xxh3 by blocks, sha256 over these)."""

    version: int
    rounds: int
    """Merged so far, in parts of `weights.WHOLE`."""
    digest: str
    seq: int
    tokens_mark: int
    steps_mark: int
    captured_step: int
    """Of the newest capture point; 0: there was none."""
    captured_version: int
    weights: str


class OfferProgress(msgspec.Struct, frozen=True):
    """An offer that was open."""

    fragment: int
    seq: int
    base: int
    capture_step: int
    tokens: int
    steps: int
    tokens_total: int
    steps_total: int


class Progress(msgspec.Struct, frozen=True):
    """Of one rank. Tokens of the ledger are summed over fragments."""

    step: int
    tokens: int
    merged: int
    discarded: int
    missed: tuple[tuple[str, int], ...]
    fragments: tuple[FragmentProgress, ...]
