"""`mend repro` as a user runs it, on training scripts that know nothing of it and have a fault that
only a GPU has; and certificates over two GPUs. The same through functions: test_repro.py."""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mend.tools.certify import visible_gpus

ROOT = Path(__file__).parents[2]
LIMIT_S = 240

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SCRIPT = """
import argparse, torch, torch.nn as nn
{imports}
parser = argparse.ArgumentParser()
parser.add_argument("--microbatches", type=int, default=1)
parts = parser.parse_args().microbatches
ROWS, PAIRS, WIDTH, STEPS, PARTS = 8, 1 << 14, 32, 4, 128

{fault}

class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(PAIRS, WIDTH) / PAIRS**0.5)

    def forward(self, x):
        {forward}

torch.manual_seed(1)
with torch.device("cuda"):
    model = nn.Sequential(nn.ReLU(), Mix(), nn.Tanh())
    batches = torch.randn(STEPS, ROWS, PAIRS)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in batches:
    optimizer.zero_grad()
    for part in batch.chunk(parts):
        model(part).square().sum().backward()
    optimizer.step()
"""

ATOMIC = """
def mixed(x, weight):
    part = x[:, :PARTS, None] * weight[:PARTS]
    where = torch.arange(len(x), device=x.device).repeat_interleave(PARTS)
    return x.new_zeros(len(x), WIDTH).index_add(0, where, part.flatten(0, 1))  # fault
"""

SPLIT_K = """
@triton.jit
def kernel(x_p, weight_p, out_p, M, K, N: tl.constexpr, SPLIT: tl.constexpr):
    m, n = tl.program_id(0), tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for k in range(tl.program_id(1) * SPLIT, (tl.program_id(1) + 1) * SPLIT):
        total += tl.load(x_p + m * K + k) * tl.load(weight_p + k * N + n)
    tl.atomic_add(out_p + m * N + n, total)  # in the order in which the parts of K are ready

@torch.library.custom_op("mine::split_k_product", mutates_args=())
def split_k_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(len(x), WIDTH)
    kernel[(len(x), PARTS)](x.contiguous(), weight, out, len(x), PAIRS, WIDTH, PAIRS // PARTS)
    return out

split_k_product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
"""

BATCH = """
@torch.library.custom_op("mine::batch_product", mutates_args=())
def batch_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    count = PARTS // len(x)  # more parts where fewer rows would leave the GPU idle
    split = x.unflatten(1, (count, -1)).transpose(0, 1)
    return torch.bmm(split, weight.unflatten(0, (count, -1))).sum(0)

batch_product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
"""


def script(folder: Path, forward: str, fault: str = "", imports: str = "") -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(forward=forward, fault=fault, imports=imports))
    return str(path)


def mend_repro(folder: Path, *words: str) -> tuple[int, str, str]:
    """Status, stdout and stderr. The script is in the current folder, as a user's is."""
    paths = [str(ROOT / "src"), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mend", "repro", *words],
        cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def tails(said: tuple[int, str, str]) -> str:
    status, out, err = said
    return f"status {status}\n-- stdout\n{out[-4000:]}\n-- stderr\n{err[-4000:]}"


def rows_of(said: tuple[int, str, str]) -> dict[str, str]:
    """name -> value of a finding as people read it."""
    assert said[0] == 1, tails(said)
    lines = [line[4:] for line in said[1].splitlines() if line.startswith("    ")]
    return {line[:11].strip(): line[11:] for line in lines}


def source(folder: Path, line: str) -> str:
    name, _, number = line.rpartition(":")
    return linecache.getline(str(folder / name), int(number)).strip()


def test_an_atomic_add_is_found(tmp_path: Path) -> None:
    script(tmp_path, "return mixed(x, self.weight)", ATOMIC)
    said = mend_repro(tmp_path, "train.py")
    rows = rows_of(said)
    assert rows["operator"] == "aten.index_add.default", tails(said)
    assert (rows["direction"], rows["module"]) == ("forward", "1"), tails(said)
    assert source(tmp_path, rows["line"]).endswith("# fault"), tails(said)
    assert "order depends on threads or time (atomics)" in rows["likely"], tails(said)
    assert "repeating them with the operators of step" in said[2], tails(said)


def test_a_split_k_product_is_found(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    imports = "import triton, triton.language as tl"
    script(tmp_path, "return split_k_product(x, self.weight)", SPLIT_K, imports)
    said = mend_repro(tmp_path, "train.py")
    rows = rows_of(said)
    assert rows["operator"] == "mine.split_k_product.default", tails(said)
    assert (rows["direction"], rows["module"]) == ("forward", "1"), tails(said)
    assert source(tmp_path, rows["line"]) == "return split_k_product(x, self.weight)", tails(said)
    assert "order depends on threads or time (atomics)" in rows["likely"], tails(said)


def test_a_kernel_that_depends_on_the_batch_is_found(tmp_path: Path) -> None:
    script(tmp_path, "return batch_product(x, self.weight)", BATCH)
    cuts = ("--a-args", "--microbatches 1", "--b-args", "--microbatches 4")
    said = mend_repro(tmp_path, *cuts, "--", "train.py")
    rows = rows_of(said)
    assert rows["operator"] == "mine.batch_product.default", tails(said)
    assert (rows["direction"], rows["module"]) == ("forward", "1"), tails(said)
    assert source(tmp_path, rows["line"]) == "return batch_product(x, self.weight)", tails(said)
    assert "depends on how many rows are in the batch" in rows["likely"], tails(said)


def test_a_script_without_a_fault_is_equal(tmp_path: Path) -> None:
    script(tmp_path, "return torch.tanh(x[:, :WIDTH] * self.weight[:1])")
    said = mend_repro(tmp_path, "train.py")
    assert said[0] == 0, tails(said)
    assert said[1] == "equal: 4 steps: losses, gradients, weights, optimizer\n", tails(said)


def test_another_gpu_is_a_cut_of_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "return torch.tanh(x[:, :WIDTH] * self.weight[:1])")
    words = ("--certify", "--microbatches", "1", "--ranks", "1")
    said = mend_repro(tmp_path, *words, "--output", "first.json", "train.py")
    assert said[0] == 0, tails(said)
    content = json.loads((tmp_path / "first.json").read_text())["content"]
    verdicts = {each["cut"]: (each["verdict"], each["why"]) for each in content["cuts"]}
    assert verdicts["repeated"] == ("equal", ""), tails(said)
    gpus = visible_gpus()
    if len(gpus) < 2:
        missing = ("not available", "needs 2 GPUs, this machine shows 1")
        assert verdicts["another GPU"] == missing, tails(said)
        return
    assert verdicts["another GPU"] == ("equal", ""), tails(said)
    assert "on another GPU" in content["claim"], tails(said)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus[1])
    said = mend_repro(tmp_path, *words, "--output", "second.json", "train.py")
    assert said[0] == 0, tails(said)
    said = mend_repro(tmp_path, "--verify", "first.json", "--against", "second.json")
    assert said[0] == 0, tails(said)
    assert "equal: 4 steps" in said[1], tails(said)
