"""The CUDA C of level everywhere, run here: a C++ compiler takes it with the intrinsics of CUDA as
plain operations and threads of the CPU as those of a block. It gives the bits of the CPU's kernels.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from mend.determinism import chains, cuda_code
from mend.determinism.digests import same_bits
from mend.kernels import elementary

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PLAIN = """
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
using std::min;
struct Place { int x, y, z; };
struct float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
thread_local Place threadIdx;
static Place blockIdx, gridDim;
static std::barrier<>* meeting;
static float shuffled[256];
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
static void __syncthreads() { meeting->arrive_and_wait(); }
static float __shfl_down_sync(unsigned, float v, int by) {
  int t = threadIdx.x; shuffled[t] = v; __syncthreads();
  float found = t % 32 + by < 32 ? shuffled[t + by] : v; __syncthreads(); return found;
}
template <class To, class From> To bits_as(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dsub_rn(double a, double b) { return a - b; }
static double __dmul_rn(double a, double b) { return a * b; }
static float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static int __float_as_int(float a) { return bits_as<int>(a); }
static float __int_as_float(int a) { return bits_as<float>(a); }
static double __longlong_as_double(long long a) { return bits_as<double>(a); }
static int __double2loint(double a) { return (int)bits_as<long long>(a); }
static float __int2float_rn(int a) { return (float)a; }
static float __double2float_rn(double a) { return (float)a; }
template <class Kernel> void launch(int blocks, int batch, Kernel kernel) {
  gridDim = {blocks, 1, batch};
  for (int z = 0; z < batch; z++)
    for (int x = 0; x < blocks; x++) {
      blockIdx = {x, 0, z};
      std::barrier<> all(256); meeting = &all;
      std::vector<std::thread> threads;
      for (int t = 0; t < 256; t++) threads.emplace_back([=] { threadIdx = {t, 0, 0}; kernel(); });
      for (auto& each : threads) each.join();
    }
}
"""

CALL_PRODUCT = """
extern "C" void call(int blocks, int batch, float* a, float* b, float* c, int M, int N, int K,
                     int a_step, int b_step, int a_batch, int b_batch) {
  launch(blocks, batch, [=] { product(a, b, c, M, N, K, a_step, b_step, a_batch, b_batch); });
}
"""
CALL_SUMS = """
extern "C" void call(int blocks, float* x, float* out, int rows, int features) {
  launch(blocks, 1, [=] { row_sums(x, out, rows, features); });
}
"""


def built(folder: Path, source: str) -> ctypes.CDLL:
    code, library = folder / "code.cpp", folder / "code.so"
    code.write_text(PLAIN + source)
    options = ["-std=c++20", "-O2", "-ffp-contract=off", "-fno-math-errno", "-w", "-shared"]
    subprocess.run(
        [str(COMPILER), *options, "-fPIC", "-pthread", "-mfma", "-o", str(library), str(code)],
        check=True,
    )
    return ctypes.CDLL(str(library))


def pointer(x: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


def test_functions_have_equal_bits(tmp_path: Path) -> None:
    """Of normal inputs, and of all patterns of bits."""
    serial = cuda_code.maps_source().replace("blockIdx.x * 256 + threadIdx.x", "0")
    library = built(tmp_path, serial.replace("(size_t)gridDim.x * 256", "1"))
    random = np.random.default_rng(6)
    inputs = [
        random.normal(size=60_000).astype(np.float32) * np.repeat([1e-3, 1, 30], 20_000),
        random.integers(0, 1 << 32, 100_000, np.uint32).view(np.float32),
    ]
    for name in (*elementary.UNARY, *elementary.BINARY):
        for x in inputs:
            x32 = x.astype(np.float32)
            given = [x32] if name in elementary.UNARY else [x32[::-1].copy(), x32]
            found = np.empty_like(x32)
            getattr(library, f"map_{name}")(*map(pointer, given), pointer(found), len(found))
            expected = chains.apply(name, *map(torch.from_numpy, given)).numpy()
            numbers = ~(np.isnan(found) & np.isnan(expected))
            assert np.array_equal(
                found.view(np.int32)[numbers], expected.view(np.int32)[numbers]
            ), name


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ((False, True, True, True, True), (2, 68, 72, 36)),
        ((False, True, False, False, False), (1, 5, 67, 19)),
        ((True, False, False, True, True), (1, 132, 136, 20)),
        ((True, True, True, False, True), (1, 130, 65, 36)),
    ],
)
def test_products_have_equal_bits(
    tmp_path: Path,
    kind: tuple[bool, bool, bool, bool, bool],
    shape: tuple[int, int, int, int],
) -> None:
    wide, a_along, b_along, *_ = kind
    batch, rows, columns, pairs = shape
    library = built(tmp_path, cuda_code.product_source(*kind) + CALL_PRODUCT)
    generator = torch.Generator().manual_seed(7)
    a = torch.randn(batch, rows, pairs, generator=generator)
    b = torch.randn(batch, pairs, columns, generator=generator)
    left = (a if a_along else a.transpose(1, 2)).contiguous().numpy()
    right = (b.transpose(1, 2) if b_along else b).contiguous().numpy()
    found = np.full((batch, rows, columns), np.nan, np.float32)
    tile = 128 if wide else 64
    blocks = -(-rows // tile) * -(-columns // tile)
    steps = (left.shape[2], right.shape[2], left[0].size, right[0].size)
    library.call(
        blocks, batch, *map(pointer, (left, right, found)), rows, columns, pairs, *steps
    )  # fmt: skip
    assert same_bits(torch.from_numpy(found), chains.product(a, b))


def test_sums_of_rows_have_equal_bits(tmp_path: Path) -> None:
    library = built(tmp_path, cuda_code.ROW_SUMS + CALL_SUMS)
    for features in (1, 31, 777):
        x = torch.randn(16, features, generator=torch.Generator().manual_seed(8))
        found = np.empty(16, np.float32)
        library.call(2, pointer(x.numpy()), pointer(found), 16, features)
        assert same_bits(torch.from_numpy(found), chains.row_sums(x))


def test_a_line_that_cannot_be_translated_is_refused() -> None:
    import ast

    tree = ast.parse("def f(a):\n    for x in a:\n        pass").body[0]
    assert isinstance(tree, ast.FunctionDef)
    with pytest.raises(ValueError, match="f: for x in a"):
        cuda_code._function(tree, {})
