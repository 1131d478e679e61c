"""PowerSGD as racks that share a basis do it. Formulas, no bytes; imports nothing of mend on
purpose.

Whole numbers of few bits, multiplied and added in float64: exact, whatever the order.

Legend: m rows and n columns of a matrix, r its rank, k the length of a basis (n or m).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_TINY = 2.0**-60

Array = np.ndarray


def rank_of(payload: str) -> int:
    """0: another codec."""
    return int(payload.removeprefix("powersgd-")) if payload.startswith("powersgd-") else 0


class Part:
    """The part of one tensor that one rank of a rack sends: elements [start, stop) of `shape`."""

    def __init__(self, shape: Sequence[int], start: int, stop: int, rank: int) -> None:
        folds = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
        _, cols = min(folds or [(1, stop)], key=max)
        self.first = start // max(1, cols)
        self.lead, self.numel, self.rank = start - self.first * cols, stop - start, rank
        self.rows, self.cols = -(-stop // max(1, cols)) - self.first, cols
        self.low = rank < min(self.rows, self.cols)

    def length(self, side: int) -> int:
        return self.rows if side else self.cols

    def first_basis(self, side: int, number: int) -> Array:
        return _basis(_noise(self.rank, self.length(side), [side, number]))

    def sent(self, x: Tensor, basis_rk: Array, side: int) -> tuple[Tensor, Array]:
        """The decoded values, and the factor (r, k) that is sent."""
        whole = np.zeros(self.rows * self.cols)
        whole[self.lead : self.lead + self.numel] = x.numpy()
        x_mn = whole.reshape(self.rows, self.cols)
        terms = self.length(side)
        factor = np.zeros((self.rank, self.length(1 - side)))
        peak = np.abs(x_mn).max()
        if peak >= _TINY:
            bits = min(23, 37 - math.ceil(math.log2(terms)))
            unit = 2.0 ** (_above(peak) - bits)
            x_mn = np.rint(x_mn / unit) * unit
            factor = basis_rk @ (x_mn if side else x_mn.T)
        peak = np.abs(factor).max()
        unit = 2.0 ** (_above(peak) - 15) if peak >= _TINY else 1.0
        levels = np.clip(np.rint(factor / unit), -32767, 32767) if peak >= _TINY else 0 * factor
        factor = levels * unit
        y_mn = basis_rk.T @ factor if side else factor.T @ basis_rk
        y = y_mn.reshape(-1)[self.lead : self.lead + self.numel]
        return torch.from_numpy(y.astype(np.float32)), factor

    def next_basis(self, merged_rk: Array, seed: Sequence[int]) -> Array:
        noise = _noise(len(merged_rk), merged_rk.shape[1], seed)
        peak = np.abs(merged_rk).max()
        return _basis(merged_rk / peak + noise / 1024 if peak > 0 else noise)


Factors = dict[tuple[int, int], Array]
"""By rank of the rack and tensor of the fragment."""


class Fragment:
    """The bases of a fragment, by version. Each rank of a rack has its own, per tensor."""

    def __init__(self, shapes: Sequence[Sequence[int]], ranks: int, rank: int) -> None:
        self.parts: dict[tuple[int, int], Part] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.cuts = [0]
        for shape in shapes:
            self.cuts.append(self.cuts[-1] + math.prod(shape))
        for r in range(ranks):
            low = 0
            for i, shape in enumerate(shapes):
                numel = math.prod(shape)
                part = Part(shape, numel * r // ranks, numel * (r + 1) // ranks, rank)
                self.parts[r, i], self.numbers[r, i] = part, low
                low += part.low
        self.ranks = ranks
        self.bases = {version: self._first(version) for version in (-1, 0)}

    def _first(self, version: int) -> Factors:
        return {
            key: part.first_basis(version % 2, self.numbers[key])
            for key, part in self.parts.items()
            if part.low
        }

    def sent(self, x: Tensor, base: int) -> tuple[Tensor, Factors]:
        """The decoded vector of all tensors, and the factors that are sent."""
        y, factors = torch.empty_like(x), {}
        for key, part in self.parts.items():
            r, i = key
            numel = self.cuts[i + 1] - self.cuts[i]
            start = self.cuts[i] + numel * r // self.ranks
            own = slice(start, start + part.numel)
            if part.low:
                y[own], factors[key] = part.sent(x[own], self.bases[base][key], base % 2)
            else:
                y[own] = x[own].to(torch.bfloat16).float()
        return y, factors

    def merged(self, version: int, offers: Sequence[tuple[int, Factors, float]]) -> None:
        """The bases of `version` + 1. `offers`: (base, factors, weight) of the members of its
        merge."""
        same_side = [offer for offer in offers if offer[0] % 2 == version % 2]
        after = self.bases[version + 1] = dict(self.bases[version - 1])
        for key in after if same_side else ():
            sum_rk = sum(factors[key] * weight for _, factors, weight in same_side)
            seed = [version % 2, self.numbers[key], version + 1]
            after[key] = self.parts[key].next_basis(np.asarray(sum_rk), seed)


def _above(peak: float) -> int:
    """The exponent of the first power of two above."""
    return math.frexp(peak)[1]


def _noise(rank: int, length: int, seed: Sequence[int]) -> Array:
    bits = np.random.PCG64(list(seed)).random_raw(rank * length)
    return np.array([int(each) // 2048 / 2.0**52 - 1 for each in bits]).reshape(rank, length)


def _basis(values_rk: Array) -> Array:
    """Gram-Schmidt twice; then rounded to 15 bits of the power of two above the greatest."""
    rows = [row.copy() for row in values_rk]
    for _ in range(2):
        for i, row in enumerate(rows):
            row /= np.sqrt(_total(row * row))
            for other in rows[i + 1 :]:
                other -= _total(other * row) * row
    unit = 2.0 ** (_above(max(np.abs(row).max() for row in rows)) - 15)
    return np.array([np.rint(row / unit) * unit for row in rows])


def _total(values: Array) -> float:
    """Added up as a tree: the second half to the first, until one number is left."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        second = np.concatenate([values[half:], np.zeros(2 * half - len(values))])
        values = values[:half] + second
    return float(values[0])
