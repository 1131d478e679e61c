"""CUDA C of level everywhere, as text: elementary functions translated from kernels/elementary.py,
products, and sums of rows, in the orders of kernels/chains.py.

Every operation is an intrinsic of CUDA that rounds as IEEE 754 says and is never contracted, so no
option of the compiler and no GPU can change a bit.
"""

from __future__ import annotations

import ast
import inspect
import struct
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

PRELUDE = """
#define E __device__ __forceinline__
E float e_add(float a, float b) { return __fadd_rn(a, b); }
E float e_sub(float a, float b) { return __fsub_rn(a, b); }
E float e_mul(float a, float b) { return __fmul_rn(a, b); }
E float e_div(float a, float b) { return __fdiv_rn(a, b); }
E double e_add(double a, double b) { return __dadd_rn(a, b); }
E double e_sub(double a, double b) { return __dsub_rn(a, b); }
E double e_mul(double a, double b) { return __dmul_rn(a, b); }
E float e_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
E double e_fma_wide(double a, double b, double c) { return __fma_rn(a, b, c); }
E float e_where(bool c, float a, float b) { return c ? a : b; }
E float e_sqrt(float a) { return __fsqrt_rn(a); }
E int e_bits(float a) { return __float_as_int(a); }
E float e_number(int a) { return __int_as_float(a); }
E int e_low_bits(double a) { return __double2loint(a); }
E float e_as_float(int a) { return __int2float_rn(a); }
E double e_widen(float a) { return (double)a; }
E float e_narrow(double a) { return __double2float_rn(a); }
E int e_plus(int a, int b) { return (int)((unsigned)a + (unsigned)b); }
E int e_minus(int a, int b) { return (int)((unsigned)a - (unsigned)b); }
E int e_masked(int a, int b) { return a & b; }
E int e_joined(int a, int b) { return a | b; }
E int e_shift_left(int a, int b) { return (int)((unsigned)a << b); }
E int e_shift_right(int a, int b) { return a >> b; }
E bool e_is_zero(int a) { return a == 0; }
"""

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "e_add",
    ast.Sub: "e_sub",
    ast.Mult: "e_mul",
    ast.Div: "e_div",
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}

_MAP = """
extern "C" __global__ void map_{name}({pointers}, float* out, int numel) {{
  for (size_t n = blockIdx.x * 256 + threadIdx.x; n < numel; n += (size_t)gridDim.x * 256)
    out[n] = e_{name}({elements});
}}
"""

ROW_SUMS = """
extern "C" __global__ void row_sums(const float* x, float* out, int rows, int features) {
  int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const float* p = x + (size_t)row * features;
  float total = 0.f;
  for (int d = lane; d < features; d += 32) total = __fadd_rn(total, p[d]);
  for (int half = 16; half; half /= 2)
    total = __fadd_rn(total, __shfl_down_sync(0xffffffffu, total, half));
  if (lane == 0) out[row] = total;
}
"""

PRODUCT = """
// c[z] = a[z] @ b[z]. AK: a is [M][K] in memory, else [K][M]; BK: b is [N][K], else [K][N]. AV, BV:
// rows begin at multiples of 16 bytes. A warp has 4 x 8 threads, a thread W x W elements.
#define T (W * 4)
#define THREADS 256
#define M_TILE (16 * W)
#define N_TILE (16 * W)
#define DEPTH 16
#define LOADS (M_TILE * DEPTH / 4 / THREADS)
#define PITCH (M_TILE + 4)
template <bool vector> __device__ __forceinline__ float4 take(const float* p, int left) {
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if (vector) { if (left > 0) v = *(const float4*)p; return v; }
  if (left > 0) v.x = p[0];
  if (left > 1) v.y = p[1];
  if (left > 2) v.z = p[2];
  if (left > 3) v.w = p[3];
  return v;
}
template <bool along, bool vector>
__device__ __forceinline__ void load(
    const float* x, float4* r, int row0, int k0, int rows, int K, int step) {
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    int at = threadIdx.x + i * THREADS;
    if (along) {
      int row = row0 + at / (DEPTH / 4), k = k0 + at % (DEPTH / 4) * 4;
      r[i] = take<vector>(x + (size_t)row * step + k, row < rows ? K - k : 0);
    } else {
      int k = k0 + at / (M_TILE / 4), row = row0 + at % (M_TILE / 4) * 4;
      r[i] = take<vector>(x + (size_t)k * step + row, k < K ? rows - row : 0);
    }
  }
}
template <bool along> __device__ __forceinline__ void store(float* s, const float4* r) {
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    int at = threadIdx.x + i * THREADS;
    if (along) {
      int row = at / (DEPTH / 4), k = at % (DEPTH / 4) * 4;
      s[k * PITCH + row] = r[i].x; s[(k + 1) * PITCH + row] = r[i].y;
      s[(k + 2) * PITCH + row] = r[i].z; s[(k + 3) * PITCH + row] = r[i].w;
    } else *(float4*)(s + at / (M_TILE / 4) * PITCH + at % (M_TILE / 4) * 4) = r[i];
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
product(const float* a, const float* b, float* c, int M, int N, int K, int a_step, int b_step,
        int a_batch, int b_batch) {
  __shared__ __align__(16) float a_s[2][DEPTH * PITCH], b_s[2][DEPTH * PITCH];
  int m_tiles = (M + M_TILE - 1) / M_TILE, n_tiles = (N + N_TILE - 1) / N_TILE;
  int group = 8 * n_tiles, first = blockIdx.x / group * 8, high = min(m_tiles - first, 8);
  int m0 = (first + blockIdx.x % group % high) * M_TILE, n0 = blockIdx.x % group / high * N_TILE;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int row = warp % 4 * T + lane / 8 * 4, column = warp / 4 * 2 * T + lane % 8 * 4;
  a += (size_t)blockIdx.z * a_batch; b += (size_t)blockIdx.z * b_batch;
  c += (size_t)blockIdx.z * M * N;
  float sum[W][W]; float4 a_r[LOADS], b_r[LOADS];
#pragma unroll
  for (int i = 0; i < W; i++)
#pragma unroll
    for (int j = 0; j < W; j++) sum[i][j] = 0.f;
  load<AK, AV>(a, a_r, m0, 0, M, K, a_step); load<BK, BV>(b, b_r, n0, 0, N, K, b_step);
  store<AK>(a_s[0], a_r); store<BK>(b_s[0], b_r);
  __syncthreads();
  int now = 0;
  for (int k0 = 0; k0 < K; k0 += DEPTH) {
    bool more = k0 + DEPTH < K;
    if (more) {
      load<AK, AV>(a, a_r, m0, k0 + DEPTH, M, K, a_step);
      load<BK, BV>(b, b_r, n0, k0 + DEPTH, N, K, b_step);
    }
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
      float x[W], y[W];
#pragma unroll
      for (int i = 0; i < W / 4; i++) {
        *(float4*)(x + 4 * i) = *(const float4*)(a_s[now] + k * PITCH + row + i * 16);
        *(float4*)(y + 4 * i) = *(const float4*)(b_s[now] + k * PITCH + column + i * 32);
      }
#pragma unroll
      for (int i = 0; i < W; i++)
#pragma unroll
        for (int j = 0; j < W; j++) sum[i][j] = __fmaf_rn(x[i], y[j], sum[i][j]);
    }
    if (more) { now ^= 1; store<AK>(a_s[now], a_r); store<BK>(b_s[now], b_r); __syncthreads(); }
  }
#pragma unroll
  for (int i = 0; i < W; i++)
#pragma unroll
    for (int j = 0; j < W; j++) {
      int m = m0 + row + i / 4 * 16 + i % 4, n = n0 + column + j / 4 * 32 + j % 4;
      if (m < M && n < N) c[(size_t)m * N + n] = __fadd_rn(sum[i][j], 0.f);
    }
}
"""
"""Beyond K both factors are 0, and 0 is added at the end: no bit depends on the padding. Beyond M
and N nothing is written."""


def product_source(wide: bool, a_along: bool, b_along: bool, a_vector: bool, b_vector: bool) -> str:
    """Of the kernel `product`: tiles of 128 x 128, or of 64 x 64."""
    values = {"W": 8 if wide else 4, "AK": a_along, "BK": b_along, "AV": a_vector, "BV": b_vector}
    return "".join(f"#define {name} {int(value)}\n" for name, value in values.items()) + PRODUCT


@cache
def maps_source() -> str:
    """Of all kernels map_NAME."""
    from mend.kernels import elementary

    kernels = ""
    for name in elementary.UNARY:
        kernels += _MAP.format(name=name, pointers="const float* x", elements="x[n]")
    for name in elementary.BINARY:
        pointers, elements = "const float* x, const float* y", "x[n], y[n]"
        kernels += _MAP.format(name=name, pointers=pointers, elements=elements)
    return PRELUDE + translation(elementary) + kernels


def translation(module: ModuleType) -> str:
    """CUDA C of the functions of kernels/elementary.py. Raises ValueError for what is not such a
    list of assignments."""
    tree = ast.parse(inspect.getsource(module))
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    return "".join(_function(each, vars(module)) for each in functions if each.decorator_list)


def _function(function: ast.FunctionDef, names: dict[str, Any]) -> str:
    known = {argument.arg for argument in function.args.args}
    result = "double" if function.name == "quarters" else "float"
    arguments = [
        f"{'int' if argument.arg == 'q' else 'float'} {argument.arg}"
        for argument in function.args.args
    ]
    lines = []
    for line in function.body:
        if isinstance(line, ast.Return) and line.value is not None:
            lines.append(f"return {_expression(line.value, known, names)};")
        elif isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            name, value = line.targets[0].id, _expression(line.value, known, names)
            lines.append(f"{name} = {value};" if name in known else f"auto {name} = {value};")
            known.add(name)
        else:
            raise ValueError(f"{function.name}: {ast.unparse(line)}")
    return f"E {result} e_{function.name}({', '.join(arguments)}) {{ {' '.join(lines)} }}\n"


def _expression(tree: ast.expr, known: set[str], names: dict[str, Any]) -> str:
    def of(each: ast.expr) -> str:
        return _expression(each, known, names)

    if isinstance(tree, ast.Name):
        return tree.id if tree.id in known else _constant(names[tree.id])
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return str(tree.value)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return f"(-{of(tree.operand)})"
    if isinstance(tree, ast.BinOp):
        return f"{_OPERATORS[type(tree.op)]}({of(tree.left)}, {of(tree.right)})"
    if isinstance(tree, ast.Compare):
        return f"({of(tree.left)} {_COMPARISONS[type(tree.ops[0])]} {of(tree.comparators[0])})"
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        return f"e_{tree.func.id}({', '.join(map(of, tree.args))})"
    raise ValueError(ast.unparse(tree))


def _constant(value: Any) -> str:
    """Of its bits, which a decimal number might miss."""
    if isinstance(value, np.float32):
        return f"__int_as_float({struct.unpack('<i', struct.pack('<f', value))[0]})"
    if isinstance(value, np.float64):
        return f"__longlong_as_double({struct.unpack('<q', struct.pack('<d', value))[0]}ll)"
    raise ValueError(f"a constant of {type(value).__name__}")
