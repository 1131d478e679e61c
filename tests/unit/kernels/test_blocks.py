"""Kernels give the bits of the torch code beside them: of payloads, and of what bytes decode to.

Legend: b blocks, k elements of a block, c bytes of a block.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mend.codec import CODECS, BlockCodec
from mend.kernels import BlockKernels, _cache_name, compiled

NAMES = ("e3m0", "int4", "int8", "topk")


def made(name: str) -> tuple[BlockCodec, BlockKernels]:
    pytest.importorskip("numba")
    codec = CODECS[name]()
    assert isinstance(codec, BlockCodec)
    kernels = codec.kernels()
    assert kernels is not None
    return codec, kernels


def numbers(codec: BlockCodec) -> Tensor:
    """Blocks of any bits below 2^64, of numbers of one size, of few that are not zero, of equals,
    and of what lies about the borders between two levels."""
    rng = np.random.default_rng(7)
    shape = (150, codec.block)
    bits = rng.integers(0, (127 + 64) << 23, shape, dtype=np.int64)
    sign = rng.integers(0, 2, shape, dtype=np.int64) << 31
    any_bits = (bits | sign).astype(np.uint32).view(np.float32)
    alike = rng.standard_normal(shape) * 10.0 ** rng.integers(-40, 18, (shape[0], 1))
    few = np.where(rng.random(shape) < 40 / codec.block, alike, 0.0 * alike)
    equals = rng.integers(-3, 4, shape) * 0.75
    halves = rng.integers(-254, 255, shape) / 2.0
    edges = 0.75 * 2.0 ** rng.integers(-9, 1, shape) * (1 + 2.0**-20 * rng.integers(-2, 3, shape))
    tiny = rng.standard_normal(shape) * 2.0 ** rng.integers(-130, -98, (shape[0], 1))
    parts = [any_bits, alike, few, equals, halves, edges, tiny, np.zeros(shape), -np.zeros(shape)]
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_encodes_to_the_bytes_of_torch(name: str) -> None:
    codec, kernels = made(name)
    x_bk = numbers(codec)
    wanted_bc = torch.full((len(x_bk), codec.block_bytes), 1, dtype=torch.uint8)
    found_bc = torch.full_like(wanted_bc, 2)
    codec.encode_blocks(x_bk, wanted_bc)
    kernels.encode(x_bk.numpy(), found_bc.numpy())
    assert torch.equal(found_bc, wanted_bc)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_decodes_any_bytes_to_the_bits_of_torch(name: str) -> None:
    codec, kernels = made(name)
    junk = np.random.default_rng(3).integers(0, 256, (2000, codec.block_bytes), dtype=np.uint8)
    rows_bc = torch.from_numpy(junk)
    wanted_bk = torch.full((len(rows_bc), codec.block), 1.0)
    found_bk = torch.full_like(wanted_bk, 2.0)
    codec.decode_blocks(rows_bc, wanted_bk)
    kernels.decode(rows_bc.numpy(), found_bk.numpy())
    number = ~wanted_bk.isnan()
    assert torch.equal(found_bk.isnan(), ~number)
    assert torch.equal(found_bk[number].view(torch.int32), wanted_bk[number].view(torch.int32))


@pytest.mark.parametrize("name", NAMES)
def test_codecs_use_them_and_hold_no_lock(name: str) -> None:
    codec, kernels = made(name)
    x = torch.ones(3 * codec.block)
    with torch.profiler.profile(acc_events=True) as seen:
        codec.decode(codec.encode(x), 0, len(x), torch.empty(len(x)))
    assert not {"aten::mul", "aten::mul_", "aten::copy_"} & {each.name for each in seen.events()}
    for kernel in kernels:
        assert kernel.targetoptions["nogil"]


def divide(a: float, b: float) -> float:
    return a / b


_WITHOUT = """
import sys
from pathlib import Path
sys.modules["numba"] = None
from mend.codec import Int8
from mend.kernels import block_kernels
assert block_kernels("int8") is None
import torch
print(Int8().encode(torch.ones(128))[4:].unique().tolist())
"""


def run(script: str, **environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_without_numba_torch_does_it() -> None:
    assert run(_WITHOUT) == ("[127]\n", "")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where numba keeps what it compiles for this test, as for one process behind another: what it
    has compiled is not remembered."""
    config = pytest.importorskip("numba").config
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_damaged_cache_is_not_used(kept: Path) -> None:
    """It ended every start of the job."""

    def again() -> float:
        return compiled("f8(f8, f8)", divide)(1.0, 4.0)

    assert again() == 0.25
    (index,) = kept.rglob("*.nbi")
    whole = index.read_bytes()
    for length in (20, 0):
        os.truncate(index, length)
        assert again() == 0.25
    index.write_bytes(whole)
    (code,) = kept.rglob("*.nbc")
    os.truncate(code, 20)
    assert again() == 0.25


def test_function_compiled_with_other_options_is_not_reused(kept: Path) -> None:
    """numba's own key knows the code of a function, and nothing of its options."""

    def at_zero(model: str) -> float:
        return compiled("f8(f8, f8)", divide, error_model=model)(1.0, 0.0)

    assert at_zero("numpy") == math.inf
    with pytest.raises(ZeroDivisionError):
        at_zero("python")
    assert at_zero("numpy") == math.inf
    assert len(list(kept.rglob("*.nbc"))) == 2, "the third found what the first kept"


def test_a_cache_does_not_depend_on_the_order_of_a_set() -> None:
    """That of names differs from process to process: one in two compiled the products anew."""
    first, other = {0, 8}, {8, 0}
    assert [*first] != [*other]
    names = {_cache_name("f8(f8, f8)", divide, {"fastmath": each}) for each in (first, other)}
    assert len(names) == 1


_FAILS = """
import numba, torch
def njit(*_, **__):
    raise OSError(28, "no space left")
numba.njit = njit
from mend.codec import Int8
print(Int8().encode(torch.ones(128))[4:].unique().tolist())
from mend.kernels import product_kernels
assert product_kernels() is None
"""


@pytest.mark.parametrize("where", ["import", "compiler"])
def test_where_numba_fails_torch_does_it_and_says_so(tmp_path: Path, where: str) -> None:
    script, error = _FAILS, "OSError: [Errno 28] no space left"
    if where == "import":
        (tmp_path / "numba").mkdir()
        fails = "raise SystemError('initialization failed')"
        (tmp_path / "numba" / "__init__.py").write_text(fails)
        script, error = _WITHOUT.replace('sys.modules["numba"] = None', ""), "SystemError: init"
    else:
        pytest.importorskip("numba")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    told, warned = run(script, PYTHONPATH=path)
    assert told == "[127]\n"
    assert f"codecs run without numba, slower: {error}" in warned
