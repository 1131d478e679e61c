"""kernels.products: a matrix, rounded to whole numbers, times few vectors. Touches arrays only.

All terms are whole multiples of one unit whose sums stay below 2^53, so float64 holds each of them
exactly: the order of a sum, which the compiler chooses here, has no influence on its bits.

Legend: m rows and n columns of a matrix, r vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mend.kernels import ProductKernels, compiled, part

_AT_ONCE = 4
"""Vectors, or rows, per pass over a row. What they share stays in registers."""


@part
def _round(row_n: Any, scale: Any, out_n: Any) -> None:
    for j in range(len(row_n)):
        out_n[j] = np.rint(row_n[j] * scale)


def _right(x_mn: Any, basis_rn: Any, scale: Any, out_rm: Any) -> None:
    rank, (rows, cols) = len(basis_rn), x_mn.shape
    row_n = np.empty(cols)
    for i in range(rows):
        _round(x_mn[i], scale, row_n)
        for q in range(0, rank - _AT_ONCE + 1, _AT_ONCE):
            a, b, c, d = basis_rn[q], basis_rn[q + 1], basis_rn[q + 2], basis_rn[q + 3]
            e, f, g, h = 0.0, 0.0, 0.0, 0.0
            for j in range(cols):
                value = row_n[j]
                e, f, g, h = e + value * a[j], f + value * b[j], g + value * c[j], h + value * d[j]
            out_rm[q, i], out_rm[q + 1, i], out_rm[q + 2, i], out_rm[q + 3, i] = e, f, g, h
        for q in range(rank // _AT_ONCE * _AT_ONCE, rank):
            a, e = basis_rn[q], 0.0
            for j in range(cols):
                e += row_n[j] * a[j]
            out_rm[q, i] = e


def _left(x_mn: Any, basis_rm: Any, scale: Any, out_rn: Any) -> None:
    rank, (rows, cols) = len(basis_rm), x_mn.shape
    rows_4n = np.empty((_AT_ONCE, cols))
    out_rn[:] = 0.0
    for i in range(0, rows - _AT_ONCE + 1, _AT_ONCE):
        for k in range(_AT_ONCE):
            _round(x_mn[i + k], scale, rows_4n[k])
        a, b, c, d = rows_4n[0], rows_4n[1], rows_4n[2], rows_4n[3]
        for q in range(rank):
            out_n, each = out_rn[q], basis_rm[q]
            e, f, g, h = each[i], each[i + 1], each[i + 2], each[i + 3]
            for j in range(cols):
                out_n[j] += a[j] * e + b[j] * f + c[j] * g + d[j] * h
    for i in range(rows // _AT_ONCE * _AT_ONCE, rows):
        _round(x_mn[i], scale, rows_4n[0])
        for q in range(rank):
            out_n, e = out_rn[q], basis_rm[q, i]
            for j in range(cols):
                out_n[j] += rows_4n[0, j] * e


def kernels() -> ProductKernels:
    signature, exact = "void(f4[:, ::1], f8[:, ::1], f4, f8[:, ::1])", {"reassoc", "nsz"}
    return ProductKernels(
        compiled(signature, _right, fastmath=exact), compiled(signature, _left, fastmath=exact)
    )
