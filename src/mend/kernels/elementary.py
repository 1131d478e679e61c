"""kernels.elementary: elementary functions of fp32 whose bits no device changes. Touches numbers
only.

They consist of additions, multiplications, divisions and square roots that are rounded correctly,
and of fused multiply-adds (IEEE 754). This file is their one source: numba compiles it for a CPU,
and mend.determinism.cuda_code translates it to CUDA C. So a function here is a list of assignments
and a return; it calls only functions of this file, and its constants are names or whole numbers.
numba must not be asked to contract or reorder (`fastmath`).

Sources: N. Juffa's public domain implementations (exp, log, tanh, erf, cores of sin and cos); the
reduction of angles is that of Cody and Waite in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mend.kernels import part

# what a processor does in one instruction

_F32, _F64, _I32, _BOOL = types.float32, types.float64, types.int32, types.boolean
_WORD, _LONG = ir.IntType(32), ir.IntType(64)


def _instruction(
    result: types.Type, arguments: tuple[types.Type, ...], emit: Callable[..., Any]
) -> Any:
    """A function of numba that is `emit(builder, *arguments)`."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return emit(builder, *values)

    signature = result(*arguments)
    if len(arguments) == 1:
        return intrinsic(lambda typing, a: (signature, code))
    if len(arguments) == 2:
        return intrinsic(lambda typing, a, b: (signature, code))
    return intrinsic(lambda typing, a, b, c: (signature, code))


fma = _instruction(_F32, (_F32, _F32, _F32), lambda to, a, b, c: to.fma(a, b, c))
"""a * b + c, rounded once."""
fma_wide = _instruction(_F64, (_F64, _F64, _F64), lambda to, a, b, c: to.fma(a, b, c))
where = _instruction(_F32, (_BOOL, _F32, _F32), lambda to, c, a, b: to.select(c, a, b))
sqrt = _instruction(
    _F32,
    (_F32,),
    lambda to, a: to.call(to.module.declare_intrinsic("llvm.sqrt", [ir.FloatType()]), [a]),
)
bits = _instruction(_I32, (_F32,), lambda to, a: to.bitcast(a, _WORD))
number = _instruction(_F32, (_I32,), lambda to, a: to.bitcast(a, ir.FloatType()))
"""The inverse of bits()."""
low_bits = _instruction(_I32, (_F64,), lambda to, a: to.trunc(to.bitcast(a, _LONG), _WORD))
as_float = _instruction(_F32, (_I32,), lambda to, a: to.sitofp(a, ir.FloatType()))
widen = _instruction(_F64, (_F32,), lambda to, a: to.fpext(a, ir.DoubleType()))
narrow = _instruction(_F32, (_F64,), lambda to, a: to.fptrunc(a, ir.FloatType()))
plus = _instruction(_I32, (_I32, _I32), lambda to, a, b: to.add(a, b))
minus = _instruction(_I32, (_I32, _I32), lambda to, a, b: to.sub(a, b))
masked = _instruction(_I32, (_I32, _I32), lambda to, a, b: to.and_(a, b))
joined = _instruction(_I32, (_I32, _I32), lambda to, a, b: to.or_(a, b))
shift_left = _instruction(_I32, (_I32, _I32), lambda to, a, b: to.shl(a, b))
shift_right = _instruction(_I32, (_I32, _I32), lambda to, a, b: to.ashr(a, b))
is_zero = _instruction(_BOOL, (_I32,), lambda to, a: to.icmp_signed("==", a, _WORD(0)))

# constants

_F = np.float32
ZERO, ONE, TWO, HALF = _F(0), _F(1), _F(2), _F(0.5)
INF, NAN = _F(math.inf), _F(math.nan)
LOG2_E, SHIFTER, LN2_HIGH, LN2_LOW = (
    _F(1.442695041), _F(12582912), _F(-6.93145752e-1), _F(-1.42860677e-6),
)  # fmt: skip
EXP_MIN, EXP_MAX = _F(-104), _F(89)
E0, E1, E2, E3, E4 = (
    _F(1.37805939e-3), _F(8.37312452e-3), _F(4.16695364e-2), _F(1.66664720e-1), _F(4.99999851e-1),
)  # fmt: skip
NORMAL_MIN, NORMAL_SCALE, NORMAL_BITS = _F(1.17549435e-38), _F(8388608), _F(-23)
ULP, LN2 = _F(1.19209290e-7), _F(0.693147182)
L0, L1, L2, L3 = _F(-0.130187988), _F(0.140869141), _F(-0.121483445), _F(0.139814854)
L4, L5, L6, L7 = _F(-0.166846126), _F(0.200120345), _F(-0.249996200), _F(0.333331972)
T0, T1, T2, T3, TANH_SPLIT = (
    _F(1.57296088e-2), _F(-5.23025580e-2), _F(1.33152470e-1), _F(-3.33327681e-1), _F(0.55),
)  # fmt: skip
ERF_SPLIT = _F(0.927734375)
F0, F1, F2, F3 = _F(-1.72853470e-5), _F(3.83197126e-4), _F(-3.88396438e-3), _F(2.42546219e-2)
F4, F5, F6 = _F(-1.06777877e-1), _F(-6.34846687e-1), _F(-1.28717512e-1)
G0, G1, G2 = _F(-5.96761703e-4), _F(4.99119423e-3), _F(-2.67681349e-2)
G3, G4, G5 = _F(1.12819925e-1), _F(-3.76125336e-1), _F(1.28379166e-1)
S0, S1, S2, S3 = _F(2.86567956e-6), _F(-1.98559923e-4), _F(8.33338592e-3), _F(-1.66666672e-1)
C0, C1, C2, C3 = _F(2.44677067e-5), _F(-1.38877297e-3), _F(4.16666567e-2), _F(-5e-1)
TWO_OVER_PI, HALF_PI, HALF_PI_LOW = (
    np.float64(2 / math.pi), np.float64(-math.pi / 2), np.float64(-6.123233995736766e-17),
)  # fmt: skip
WIDE_SHIFTER, ANGLE_MAX = np.float64(6755399441055744.0), _F(2**30)
GELU_SCALE, GELU_CUBE, GELU_CUBES = (
    _F(math.sqrt(2 / math.pi)), _F(0.044715), _F(3 * 0.044715),
)  # fmt: skip
SQRT_HALF, DENSITY = _F(math.sqrt(0.5)), _F(1 / math.sqrt(2 * math.pi))

# functions, each of those above it


@part
def exp(a: Any) -> Any:
    x = where(a < EXP_MIN, EXP_MIN, a)
    x = where(x > EXP_MAX, EXP_MAX, x)
    t = fma(x, LOG2_E, SHIFTER)
    i = minus(masked(bits(t), 0x7FFFFF), 0x400000)
    t = t - SHIFTER
    f = fma(t, LN2_LOW, fma(t, LN2_HIGH, x))
    r = fma(fma(fma(fma(E0, f, E1), f, E2), f, E3), f, E4)
    r = fma(fma(r, f, ONE), f, ONE)
    h = shift_right(i, 1)
    r = r * number(shift_left(plus(h, 127), 23))
    r = r * number(shift_left(plus(minus(i, h), 127), 23))
    return where(a != a, NAN, r)


@part
def log(a: Any) -> Any:
    small = a < NORMAL_MIN
    x = where(small, a * NORMAL_SCALE, a)
    i = where(small, NORMAL_BITS, ZERO)
    e = masked(minus(bits(x), 0x3F2AAAAB), -8388608)
    m = number(minus(bits(x), e)) - ONE
    i = fma(as_float(e), ULP, i)
    s = m * m
    r = fma(fma(fma(L0, s, L2), s, L4), s, L6)
    t = fma(fma(L1, s, L3), s, L5)
    r = fma(fma(fma(t, m, r), m, L7), m, -HALF)
    r = fma(i, LN2, fma(r, s, m))
    r = where(a > ZERO, r, where(a == ZERO, -INF, NAN))
    return where(a == INF, a, r)


@part
def rsqrt(a: Any) -> Any:
    return ONE / sqrt(a)


@part
def sigmoid(a: Any) -> Any:
    return ONE / (ONE + exp(-a))


@part
def absolute(a: Any) -> Any:
    return number(masked(bits(a), 0x7FFFFFFF))


@part
def with_sign(a: Any, sign: Any) -> Any:
    return number(joined(bits(a), masked(bits(sign), -2147483648)))


@part
def tanh(a: Any) -> Any:
    x = absolute(a)
    s = a * a
    r = fma(fma(fma(T0, s, T1), s, T2), s, T3)
    r = fma(r * s, a, a)
    b = ONE - TWO / (exp(x + x) + ONE)
    return where(a != a, NAN, where(x < TANH_SPLIT, r, with_sign(b, a)))


@part
def erf(a: Any) -> Any:
    t = absolute(a)
    s = a * a
    far = fma(fma(F0, t, F1), s, fma(F2, t, F3))
    far = fma(fma(fma(far, t, F4), t, F5), t, F6)
    far = with_sign(ONE - exp(fma(far, t, -t)), a)
    near = fma(fma(fma(fma(fma(G0, s, G1), s, G2), s, G3), s, G4), s, G5)
    near = fma(near, a, a)
    return where(a != a, NAN, where(t > ERF_SPLIT, far, near))


@part
def quarters(a: Any) -> Any:
    return widen(a) * TWO_OVER_PI + WIDE_SHIFTER


@part
def remainder(a: Any) -> Any:
    k = quarters(a) - WIDE_SHIFTER
    return narrow(fma_wide(k, HALF_PI_LOW, fma_wide(k, HALF_PI, widen(a))))


@part
def sine_core(r: Any) -> Any:
    s = r * r
    p = fma(fma(fma(S0, s, S1), s, S2), s, S3)
    return fma(p, r * s, r)


@part
def cosine_core(r: Any) -> Any:
    s = r * r
    return fma(fma(fma(fma(C0, s, C1), s, C2), s, C3), s, ONE)


@part
def turned(a: Any, q: Any) -> Any:
    r = remainder(a)
    v = where(is_zero(masked(q, 1)), sine_core(r), cosine_core(r))
    v = where(is_zero(masked(q, 2)), v, -v)
    return where(absolute(a) <= ANGLE_MAX, v, NAN)


@part
def sin(a: Any) -> Any:
    return where(a == ZERO, a, turned(a, low_bits(quarters(a))))


@part
def cos(a: Any) -> Any:
    return turned(a, plus(low_bits(quarters(a)), 1))


@part
def silu(a: Any) -> Any:
    return a / (ONE + exp(-a))


@part
def gelu_tanh(a: Any) -> Any:
    inner = GELU_SCALE * fma(GELU_CUBE, a * a * a, a)
    return HALF * a * (ONE + tanh(inner))


@part
def gelu(a: Any) -> Any:
    return HALF * a * (ONE + erf(a * SQRT_HALF))


@part
def sigmoid_backward(g: Any, y: Any) -> Any:
    return g * ((ONE - y) * y)


@part
def tanh_backward(g: Any, y: Any) -> Any:
    return g * (ONE - y * y)


@part
def silu_backward(g: Any, a: Any) -> Any:
    gate = sigmoid(a)
    return g * (gate * fma(a, ONE - gate, ONE))


@part
def gelu_tanh_backward(g: Any, a: Any) -> Any:
    inner = tanh(GELU_SCALE * fma(GELU_CUBE, a * a * a, a))
    slope = GELU_SCALE * fma(GELU_CUBES, a * a, ONE)
    return g * fma(HALF * a, (ONE - inner * inner) * slope, HALF * (ONE + inner))


@part
def gelu_backward(g: Any, a: Any) -> Any:
    density = DENSITY * exp(-HALF * a * a)
    return g * fma(a, density, HALF * (ONE + erf(a * SQRT_HALF)))


UNARY = (
    "exp", "log", "rsqrt", "root", "sigmoid", "tanh", "erf", "sin", "cos", "silu", "gelu_tanh",
    "gelu",
)  # fmt: skip
BINARY = (
    "sigmoid_backward", "tanh_backward", "silu_backward", "gelu_tanh_backward", "gelu_backward",
)  # fmt: skip


@part
def root(a: Any) -> Any:
    return sqrt(a)
