"""benchmarks.h200_machine: the device under a rank of h200: which, how exact, how much memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import qwen
from benchmarks._common import proc_bytes

ATTENTION = ("flash", "efficient", "math")
"""By speed. cuDNN's is left out: its backward pass promises no order of its sums."""

SAME_TRIES = 3


def deterministic(device: torch.device, shape: qwen.Shape) -> str:
    """Only operations with a fixed order of sums; returns which attention is used."""
    torch.use_deterministic_algorithms(True)
    # It would fill whatever is allocated, mend's vectors on the host, too.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type != "cuda":
        return "default"
    torch.backends.cuda.enable_cudnn_sdp(False)
    for name in ATTENTION:
        for other in ATTENTION:
            switch = "mem_efficient" if other == "efficient" else other
            getattr(torch.backends.cuda, f"enable_{switch}_sdp")(other == name)
        if _same_bits(device, shape):
            return name
    raise SystemExit("no attention of this torch gives the same gradients twice")


def _same_bits(device: torch.device, shape: qwen.Shape) -> bool:
    """Return whether the attention that is switched on exists, and repeats its gradients."""
    attention = qwen.Attention(shape).to(device, torch.bfloat16)
    cos_TE, sin_TE = qwen.rope(512, shape.head_numel, device)
    x_BTD = torch.randn(4, 512, shape.width, device=device, dtype=torch.bfloat16)
    found = []
    for _ in range(SAME_TRIES):
        attention.zero_grad(set_to_none=True)
        try:
            attention(x_BTD, cos_TE, sin_TE).float().square().mean().backward()
        except RuntimeError:  # no kernel for grouped heads, or one that says it has no fixed order
            return False
        found.append([p.grad.clone() for p in attention.parameters() if p.grad is not None])
    return all(
        torch.equal(one, first)
        for again in found[1:]
        for one, first in zip(again, found[0], strict=True)
    )


class Clock:
    """Marks on the device's stream, read when it has come past them; on a CPU the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    @staticmethod
    def between(start: Any, stop: Any) -> float:
        """Milliseconds between two marks."""
        if isinstance(start, float):
            return float(stop - start) * 1e3
        return float(start.elapsed_time(stop))


def reset_memory(device: torch.device) -> None:
    """The most memory is counted anew; what is free goes back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM
    except OSError:  # not allowed everywhere; it goes on growing then
        return


def memory(device: torch.device) -> dict[str, int]:
    """Bytes, most since reset_memory. Pinned memory may be missing from the two of the host."""
    found = {
        "host_bytes": proc_bytes("self/status", "VmRSS"),
        "host_bytes_peak": proc_bytes("self/status", "VmHWM"),
    }
    if device.type != "cuda":
        return found
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return {
        **found,
        "gpu_allocated_bytes": torch.cuda.max_memory_allocated(),
        "gpu_reserved_bytes": torch.cuda.max_memory_reserved(),
        "pinned_bytes": int(pinned),
    }
