"""The measured loss of lossy codecs. Pure."""

from __future__ import annotations

COST_PCT: dict[tuple[str, bool], tuple[int, int]] = {
    ("topk", True): (11, 3),
    ("powersgd-4", True): (37, 11),
    ("topk", False): (35, 8),
    ("powersgd-4", False): (150, 210),
}
"""(codec, feedback in the weights; else in a buffer) -> percent of loss above offers in fp32, from
random weights and after a warm start: 5M parameters, 4 racks, H 64, 48 rounds
(docs/internals/quality.md; a test holds them to benchmarks/results/quality_gpu.md)."""


def measured_cost(codec: str, apply_mode: str) -> tuple[str, tuple[int, int]] | None:
    """The codec whose measured cost applies to this one, and the cost; None: it was not
    measured."""
    if codec != "topk" and not codec.startswith("powersgd-"):
        return None
    known = "topk" if codec == "topk" else "powersgd-4"
    return known, COST_PCT[known, apply_mode == "carry"]


def cost_of(codec: str, apply_mode: str = "carry") -> str:
    """A warning for users; empty for a codec without a measured cost."""
    found = measured_cost(codec, apply_mode)
    if found is None:
        return ""
    (known, (scratch, warm)), in_weights = found, apply_mode == "carry"
    kept = "" if in_weights else f" with a residual buffer, as with apply_mode={apply_mode!r},"
    change = f"{kept} raised" if known == codec else f": {known!r}{kept} raised"
    return (
        f"codec={codec!r}{change} the loss by {scratch} % from random weights "
        f"and {warm} % after a warm start in a run of 48 rounds; 'int4' did not raise it "
        "measurably. Use 'int4' unless the run has many hundred rounds and the link carries "
        "nothing larger (docs/compression.md)"
    )
