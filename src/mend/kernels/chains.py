"""kernels.chains: products, sums of rows and elementary functions for a CPU, whose bits are defined
and not the processor's. Touches arrays only.

An element of a product is one chain of fused multiply-adds in fp32 over K, ascending, that begins
with 0; 0 is added at the end. The sum of a row is LANES chains of additions, element i in lane i %
LANES, and a tree of halves over the lanes. Vectors of the processor hold neighbouring columns or
lanes, so no order depends on their width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from mend.kernels import compiled, elementary

LANES = 32

ROWS, COLUMNS = 6, 16
"""The size of a tile, whose sums stay in registers."""

_WORD = ir.IntType(32)


def has_fma() -> bool:
    """Whether this processor has the instruction; otherwise a library would emulate it."""
    features = binding.get_host_cpu_features()
    return bool(features.get("fma", False)) or not binding.get_process_triple().startswith("x86")


def _tile_of(rows: int) -> Any:
    """A function of (address of a, bytes of its row, address of b, address of c, K): c (rows,
    COLUMNS) = a @ b, where b is (K, COLUMNS) without gaps. It has vectors of its own, as numba
    would keep the sums in memory."""
    single, word = ir.FloatType(), ir.IntType(64)
    vector, places = ir.VectorType(single, COLUMNS), ir.VectorType(ir.IntType(32), COLUMNS)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, a_bytes, b, c, pairs = arguments
        fused = _vector_fma(builder.module, vector)

        def address(start: Any, number: Any, size: int) -> Any:
            return builder.add(start, builder.mul(number, ir.Constant(word, size)))

        def at(place: Any, kind: Any) -> Any:
            return builder.inttoptr(place, kind.as_pointer())

        starts = [address(a, ir.Constant(word, 0), 0)]
        while len(starts) < rows:
            starts.append(builder.add(starts[-1], a_bytes))
        entry = builder.block
        head, loop, end = (builder.append_basic_block(name) for name in ("head", "loop", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        k, sums = builder.phi(word), [builder.phi(vector) for _ in range(rows)]
        builder.cbranch(builder.icmp_signed("<", k, pairs), loop, end)
        builder.position_at_end(loop)
        right = builder.load(at(address(b, k, 4 * COLUMNS), vector), align=4)
        then = []
        for start, total in zip(starts, sums, strict=True):
            one = builder.load(at(address(start, k, 4), single), align=4)
            first = builder.insert_element(ir.Constant(vector, ir.Undefined), one, _WORD(0))
            left = builder.shuffle_vector(first, first, ir.Constant(places, [0] * COLUMNS))
            then.append(builder.call(fused, (left, right, total)))
        following = builder.add(k, ir.Constant(word, 1))
        builder.branch(head)
        nothing = ir.Constant(vector, [0.0] * COLUMNS)
        for phi, after, before in (
            (k, following, ir.Constant(word, 0)),
            *((phi, after, nothing) for phi, after in zip(sums, then, strict=True)),
        ):
            phi.add_incoming(before, entry)
            phi.add_incoming(after, loop)
        builder.position_at_end(end)
        for row, total in enumerate(sums):
            place = builder.add(c, ir.Constant(word, 4 * COLUMNS * row))
            builder.store(builder.fadd(total, nothing), at(place, vector), align=4)
        return context.get_dummy_value()

    signature = types.void(types.uintp, types.intp, types.uintp, types.uintp, types.intp)
    return intrinsic(lambda typing, a, a_bytes, b, c, pairs: (signature, code))


def _vector_fma(module: Any, vector: Any) -> Any:
    name = f"llvm.fma.v{COLUMNS}f32"
    kind = ir.FunctionType(vector, [vector] * 3)
    return module.globals.get(name) or ir.Function(module, kind, name)


_tile, _row = _tile_of(ROWS), _tile_of(1)


def product(a_ZMK: Any, b_ZKN: Any, c_ZMN: Any) -> None:
    """c = a @ b; c is written."""
    batch, rows, pairs = a_ZMK.shape
    columns = b_ZKN.shape[2]
    panel = np.zeros((max(pairs, 1), COLUMNS), np.float32)
    sums = np.empty((ROWS, COLUMNS), np.float32)
    bytes_of_row = 4 * pairs
    for z in range(batch):
        for first in range(0, columns, COLUMNS):
            width = min(COLUMNS, columns - first)
            for k in range(pairs):
                for n in range(width):
                    panel[k, n] = b_ZKN[z, k, first + n]
            m = 0
            while m < rows:
                count = 1 if rows < ROWS else ROWS
                m = min(m, rows - count)  # the last tile makes some rows again
                a = a_ZMK[z, m:].ctypes.data
                if count == 1:
                    _row(a, bytes_of_row, panel.ctypes.data, sums.ctypes.data, pairs)
                else:
                    _tile(a, bytes_of_row, panel.ctypes.data, sums.ctypes.data, pairs)
                for row in range(count):
                    for n in range(width):
                        c_ZMN[z, m + row, first + n] = sums[row, n]
                m += count


def row_sums(x_ND: Any, out_N: Any) -> None:
    """The sum of every row; `out_N` is written."""
    features = x_ND.shape[1]
    whole = features - features % LANES
    lanes = np.zeros(LANES, np.float32)
    for row in range(x_ND.shape[0]):
        x = x_ND[row]
        lanes[:] = np.float32(0)
        for first in range(0, whole, LANES):
            for lane in range(LANES):
                lanes[lane] += x[first + lane]
        for lane in range(features - whole):
            lanes[lane] += x[whole + lane]
        half = LANES // 2
        while half:
            for lane in range(half):
                lanes[lane] += lanes[lane + half]
            half //= 2
        out_N[row] = lanes[0]


@cache
def kernel(name: str) -> Callable[..., None]:
    """ "product", "row_sums", or a function of `elementary` as (arguments, out): flat fp32."""
    if name == "product":
        return compiled("void(f4[:,:,::1], f4[:,:,::1], f4[:,:,::1])", product)
    if name == "row_sums":
        return compiled("void(f4[:,::1], f4[::1])", row_sums)
    count = 1 if name in elementary.UNARY else 2
    inputs, elements = ("x", "y")[:count], ("x[n]", "y[n]")[:count]
    source = (
        f"def map_{name}({', '.join(inputs)}, out):\n"
        "    for n in range(out.shape[0]):\n"
        f"        out[n] = function({', '.join(elements)})\n"
    )
    # It counts as code of this file, beside which numba's cache is; a closure would be compiled in
    # every process.
    names: dict[str, Any] = {"__name__": __name__, "function": getattr(elementary, name)}
    exec(compile(source, __file__, "exec"), names)
    function: Callable[..., None] = names[f"map_{name}"]
    return compiled(f"void({'f4[::1], ' * count}f4[::1])", function)
