"""codec.cost: codecs that cost loss, as far as it was measured. Touches nothing."""

from __future__ import annotations

COST_PCT: dict[str, tuple[int, int]] = {"topk": (11, 3), "powersgd-4": (37, 11)}
"""Percent of loss above offers in fp32, from random weights and after a warm start: 5M parameters,
4 racks, H 64, 48 rounds (docs/quality.md; a test holds them to benchmarks/results/quality_gpu.md).
"""


def cost_of(codec: str) -> str:
    """A warning for people; empty of a codec that costs nothing that was measurable, or of which
    nothing is known."""
    if codec != "topk" and not codec.startswith("powersgd-"):
        return ""
    known = codec if codec in COST_PCT else "powersgd-4"
    scratch, warm = COST_PCT[known]
    said = "it" if known == codec else known
    return (
        f"{codec} sends a small part of what the racks learn: in a run of 48 rounds {said} cost "
        f"{scratch} % of loss from random weights and {warm} % after a warm start, where int4 cost "
        "nothing measurable. It is for runs of many hundred rounds over a link that carries "
        "nothing larger (docs/quality.md, docs/compression.md)"
    )
