"""benchmarks.small_problems_batch: the cells of small_problems, all seeds of a cell at once.

The same racks, rounds and rows as by the reference (mend_lab.reference), in numpy: some 30 times as
fast. A test compares the two; the last bits differ, as inner steps round elsewhere.

Legend: S seeds, R racks, N weights, n weights of a fragment, T steps, B rows, I inputs, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from benchmarks import small_problems_gpt
from benchmarks.small_problems import (
    FRAGMENTS,
    GPT,
    HIDDEN,
    INPUTS,
    OPTIMIZERS,
    RATES,
    ROWS,
    Cell,
    Problem,
    Schedule,
    problem,
    settings_of,
    speed_of,
)
from mend_lab.reference import (
    MOMENTUM_WAITS,
    Commit,
    Named,
    Settings,
    fp32,
    part,
    shares,
    stretch,
)

Array = np.ndarray[Any, Any]
F32, F64 = np.float32, np.float64
BETAS, DECAY, EPS = (0.9, 0.999), 0.01, 1e-8
"""Of torch's AdamW."""
_BLOCK, _LEVELS = 128, 7
"""Of int4."""


class _Log(Schedule):
    """A schedule that keeps merges and applies in the order in which they happen."""

    def __init__(self, cell: Cell, settings: Settings, steps: int) -> None:
        self.happened: list[tuple[int, int, Commit | int, list[int]]] = []
        self.time = 0
        super().__init__(cell, settings, steps)

    def _apply(self, time: int) -> None:
        self.time = time
        super()._apply(time)

    def _capture(
        self, fragment: int, racks: Sequence[int], time: int, closing: bool = False
    ) -> None:
        before = len(self.commits)
        super()._capture(fragment, racks, time, closing)
        for commit in self.commits[before:]:
            self.happened.append((time, fragment, commit, [closing]))

    def _apply_version(self, fragment: int, version: int, time: int) -> None:
        before = [len(events) for events in self.events]
        super()._apply_version(fragment, version, time)
        racks = [r for r, count in enumerate(before) if len(self.events[r]) > count]
        if racks:
            self.happened.append((time, fragment, version, racks))


@cache
def _rows(name: str, rack: int, seed: int, steps: int) -> tuple[Array, ...]:
    """What a Learner draws in so many steps."""
    here, generator = problem(name), torch.Generator().manual_seed(1000 * (seed + 1) + rack)
    if name == GPT:
        text = small_problems_gpt.texts()[0]
        drawn = [small_problems_gpt.windows(text, ROWS, generator) for _ in range(steps)]
        return (torch.stack(drawn).numpy(),)
    if name.startswith("quadratic"):
        return (
            torch.stack(
                [torch.randn(here.numel, generator=generator) for _ in range(steps)]
            ).numpy(),
        )
    inputs, goals = [], []
    for _ in range(steps):
        x_BI = torch.randn(ROWS, INPUTS, generator=generator)
        if name == "logistic":
            chance_B = torch.sigmoid(2 * x_BI @ here.goal_I)
            y_B = (chance_B > torch.rand(ROWS, generator=generator)).float()
        else:
            y_B = x_BI @ here.goal_I + here.noise * torch.randn(ROWS, generator=generator)
        inputs.append(x_BI)
        goals.append(y_B)
    return torch.stack(inputs).numpy(), torch.stack(goals).numpy()


@lru_cache(maxsize=2)
def _data(name: str, racks: int, seeds: int, steps: int) -> tuple[Array, ...]:
    """(S, R, T, ...) of each thing that is drawn."""
    drawn = [[_rows(name, rack, seed, steps) for rack in range(racks)] for seed in range(seeds)]
    return tuple(
        np.stack([np.stack([each[i] for each in of_seed]) for of_seed in drawn])
        for i in range(len(drawn[0][0]))
    )


def _gradient(here: Problem, theta_SRN: Array, data: Sequence[Array]) -> Array:
    if here.name == GPT:
        theta_MN, text_MBT1 = (torch.from_numpy(x).flatten(0, 1) for x in (theta_SRN, data[0]))
        return small_problems_gpt.gradients(theta_MN, text_MBT1).numpy().reshape(theta_SRN.shape)
    if here.name.startswith("quadratic"):
        curvature_N = here.curvature_N.numpy()
        wind = F32(here.noise) * np.sqrt(curvature_N) * data[0]
        return np.asarray(curvature_N * (theta_SRN - here.goal_I.numpy()) + wind)
    x_SRBI, y_SRB = data
    if here.name != "mlp":
        found_SRB = np.matmul(x_SRBI, theta_SRN[..., None])[..., 0]
        slope_SRB = 2 * (found_SRB - y_SRB) / ROWS
        if here.name == "logistic":
            slope_SRB = (1 / (1 + np.exp(-found_SRB)) - y_SRB) / ROWS
        return np.asarray(np.matmul(slope_SRB[..., None, :], x_SRBI)[..., 0, :].astype(F32))
    enter_numel = INPUTS * HIDDEN
    enter = theta_SRN[..., :enter_numel].reshape(*theta_SRN.shape[:2], INPUTS, HIDDEN)
    shift_SRH = theta_SRN[..., enter_numel : enter_numel + HIDDEN]
    leave_SRH = theta_SRN[..., enter_numel + HIDDEN : enter_numel + 2 * HIDDEN]
    hidden = np.tanh(np.matmul(x_SRBI, enter) + shift_SRH[..., None, :])
    found_SRB = np.matmul(hidden, leave_SRH[..., None])[..., 0] + theta_SRN[..., -1:]
    slope_SRB = 2 * (found_SRB - y_SRB) / F32(ROWS)
    back = slope_SRB[..., None] * leave_SRH[..., None, :] * (1 - hidden * hidden)
    into = np.matmul(np.swapaxes(x_SRBI, -1, -2), back).reshape(*theta_SRN.shape[:2], enter_numel)
    leave = np.matmul(slope_SRB[..., None, :], hidden)[..., 0, :]
    parts = [into, back.sum(-2), leave, slope_SRB.sum(-1, keepdims=True)]
    return np.concatenate(parts, -1).astype(F32)


class Racks:
    """All racks of all seeds: weights theta (S, R, N) and their inner optimizer."""

    def __init__(self, cell: Cell, seeds: int, steps: int) -> None:
        self.problem, racks = problem(cell.problem), cell.racks
        starts = [self.problem.start(seed).numpy() for seed in range(seeds)]
        self.theta_SRN: Array = np.stack(starts)[:, None].repeat(racks, 1).copy()
        self.data = _data(cell.problem, racks, seeds, steps)
        self.made_R = np.zeros(racks, int)
        self.adaptive = cell.optimizer == "adamw"
        family = next(name for name in RATES if cell.problem.startswith(name))
        self.rate = RATES[family][OPTIMIZERS.index(cell.optimizer)]
        self.first, self.second = np.zeros_like(self.theta_SRN), np.zeros_like(self.theta_SRN)
        self.moved: list[tuple[int, Array]] = []
        """Of every round but the closing ones: fragment, and by seed the magnitude per step of its
        offers, the mean of its members (S,)."""

    def step(self, racks: Sequence[int]) -> None:
        """Every rack of these makes its next step."""
        mine = np.asarray(racks)
        rows = [
            np.stack([each[:, r, self.made_R[r]] for r in racks], 1) for each in self.data
        ]  # fmt: skip
        theta = self.theta_SRN[:, mine]
        slope = _gradient(self.problem, theta, rows)
        self.made_R[mine] += 1
        if not self.adaptive:
            self.theta_SRN[:, mine] = theta - F32(self.rate) * slope
            return
        beta, gamma = BETAS
        first = self.first[:, mine] * F32(beta) + F32(1 - beta) * slope
        second = self.second[:, mine] * F32(gamma) + F32(1 - gamma) * slope * slope
        self.first[:, mine], self.second[:, mine] = first, second
        made = self.made_R[mine][None, :, None].astype(F64)
        rate, root = self.rate / (1 - beta**made), np.sqrt(1 - gamma**made)
        size = np.sqrt(second) / root.astype(F32) + F32(EPS)
        theta = theta * F32(1 - self.rate * DECAY) - rate.astype(F32) * first / size
        self.theta_SRN[:, mine] = theta

    def errors(self, weights_SN: Array) -> list[float]:
        return [self.problem.error(torch.from_numpy(each)).item() for each in weights_SN]


def _int4(x_Sn: Array) -> Array:
    short = -x_Sn.shape[1] % _BLOCK
    blocks = np.pad(x_Sn, [(0, 0), (0, short)]).reshape(len(x_Sn), -1, _BLOCK)
    peak = np.abs(blocks).max(-1, keepdims=True)
    some = peak >= 2.0**-100
    size = np.where(some, peak, F32(1))
    kept = np.rint(blocks * (F32(_LEVELS) / size)) * (size / F32(_LEVELS))
    return np.asarray(
        np.where(some, kept, F32(0)).astype(F32).reshape(len(x_Sn), -1)[:, : x_Sn.shape[1]]
    )


@dataclass
class _Part:
    """One fragment: anchors and momenta by version (S, n), and per rack its version, offer and
    residual."""

    place: slice
    anchors: list[Array]
    racks: int
    rounds: Fraction = Fraction(0)
    momentum: Array = field(init=False)
    momenta: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        self.momentum = np.zeros_like(self.anchors[0])
        self.momenta = [self.momentum]
        self.version = [0] * self.racks
        self.open: list[tuple[int, Array, Array | None] | None] = [None] * self.racks
        self.residual: list[Array | None] = [None] * self.racks


def outer_step(
    now: _Part,
    delta_Sn: Array,
    settings: Settings,
    s: Fraction,
    plain: bool,
    f: float,
    balance_S1: Array,
) -> Array:
    """`reference.outer_step` of each seed; returns the anchor and changes the momentum."""
    if plain:
        return np.asarray(now.anchors[-1] - delta_Sn * F32(s))
    mu = fp32(settings.momentum)
    if settings.ramp:
        mu = min(fp32(now.rounds / (now.rounds + settings.ramp)), mu)
    decay = F32(fp32(1 - s * (1 - Fraction(mu))))
    now.momentum = now.momentum * decay + delta_Sn * F32(float(s))
    along_S1 = balance_S1 >= float(MOMENTUM_WAITS)
    step = delta_Sn * F32(f) + np.where(along_S1, now.momentum * F32(mu), F32(0))
    return np.asarray(now.anchors[-1] - step * F32(fp32(s * Fraction(fp32(settings.outer_lr)))))


def _balance(sent_Sn: Array, momentum_Sn: Array) -> Array:
    """`reference.balance` of each seed, (S, 1)."""
    signs = np.sign(sent_Sn) * np.sign(momentum_Sn)
    return np.asarray(
        signs.sum(1, keepdims=True) / np.maximum(np.abs(signs).sum(1, keepdims=True), 1)
    )


Rule = Callable[[Sequence[Named], Settings], tuple[list[float], float]]
"""(members, settings) -> their shares of the merged delta, and by what its step is stretched."""


def in_force(members: Sequence[Named], settings: Settings) -> tuple[list[float], float]:
    """The rule of the reference."""
    return shares(members, settings), stretch(members, settings)


def _merge(
    now: _Part, racks: Racks, cell: Cell, commit: Commit, weights: Sequence[float]
) -> tuple[Array, Array]:
    """The mean of the members' offers, and of their balances."""
    total = balance_S1 = np.zeros(())
    for member, share in zip(commit.members, weights, strict=True):
        rack = member.rack
        delta = now.anchors[now.version[rack]] - racks.theta_SRN[:, rack, now.place]
        owed = now.residual[rack]
        x = delta if owed is None else delta + owed
        sent = _int4(x) if cell.codec == "int4" else x
        now.open[rack] = commit.version, delta, x - sent if cell.codec == "int4" else None
        total = total + sent.astype(F64) * share
        balance_S1 = balance_S1 + _balance(sent, now.momenta[now.version[rack]]) * share
    return np.asarray(total.astype(F32)), balance_S1


def _magnitude(now: _Part, racks: Racks, commit: Commit) -> Array:
    """What a round adds to `Racks.moved`."""
    of_members = [
        np.abs(now.anchors[now.version[rack]] - racks.theta_SRN[:, rack, now.place]).max(1) / steps
        for rack, steps in ((member.rack, member.steps) for member in commit.members)
    ]
    return np.asarray(np.mean(of_members, 0))


def _move(now: _Part, racks: Racks, version: int, rack: int) -> None:
    """A rack applies a version."""
    theta = racks.theta_SRN[:, rack, now.place]
    old, new, offer = now.anchors[now.version[rack]], now.anchors[version], now.open[rack]
    if offer is not None and offer[0] <= version:
        old = old - offer[1]
        now.residual[rack], now.open[rack] = offer[2], None
    racks.theta_SRN[:, rack, now.place] = new + (theta - old)
    now.version[rack] = version


@lru_cache(maxsize=64)
def _happened(cell: Cell, steps: int) -> list[tuple[int, int, Commit | int, list[int]]]:
    return _Log(cell, settings_of(cell), steps).happened


def merged_errors(
    cell: Cell,
    steps: int,
    seeds: int,
    momentum: float | None = None,
    rule: Rule = in_force,
    racks: Racks | None = None,
) -> list[float]:
    """`small_problems.merged_error` of each seed; with another rule, or racks that stand at their
    start."""
    settings, racks = settings_of(cell, momentum), racks or Racks(cell, seeds, steps)
    speeds = [speed_of(cell, rack) for rack in range(cell.racks)]
    sizes = [len(each) for each in torch.arange(racks.problem.numel).tensor_split(FRAGMENTS)]
    cuts = [sum(sizes[:i]) for i in range(FRAGMENTS + 1)]
    places = [slice(cuts[i], cuts[i + 1]) for i in range(FRAGMENTS)]
    start = racks.theta_SRN[:, 0].copy()
    parts = [_Part(place, [start[:, place]], cell.racks) for place in places]
    log = iter(_happened(cell._replace(problem="linear", optimizer="sgd", codec="float32"), steps))
    following = next(log, None)
    for time in range(1, steps + 1):
        if due := [r for r, v in enumerate(speeds) if math.floor(time * v) > racks.made_R[r]]:
            racks.step(due)
        while following is not None and following[0] == time:
            _, fragment, what, whom = following
            now = parts[fragment]
            if isinstance(what, Commit):
                weights, f = rule(what.members, settings)
                if not whom[0]:
                    racks.moved.append((fragment, _magnitude(now, racks, what)))
                delta, balance = _merge(now, racks, cell, what, weights)
                s = part(what, settings)
                last = bool(whom[0]) and not what.training
                plain = last or (len(what.members) == 1 and s == 1)
                step = outer_step(now, delta, settings, s, plain, 1.0 if last else f, balance)
                now.anchors.append(step)
                now.momenta.append(now.momentum)
                now.rounds += s
            else:
                for rack in whom:
                    _move(now, racks, what, rack)
            following = next(log, None)
    return racks.errors(np.concatenate([each.anchors[-1] for each in parts], 1))


@cache
def _alone(
    name: str, optimizer: str, racks: int, full: int, steps: int, seeds: int
) -> list[list[float]]:
    every = Racks(Cell(name, optimizer, racks=racks), seeds, steps)
    for _ in range(steps):
        every.step(range(racks))
    errors = [every.errors(every.theta_SRN[:, rack]) for rack in range(full)]
    return [list(each) for each in zip(*errors, strict=True)]


def alone_errors(cell: Cell, steps: int, seeds: int) -> list[list[float]]:
    """`small_problems.alone_error` of each seed."""
    full = sum(speed_of(cell, rack) == 1 for rack in range(cell.racks))
    return _alone(cell.problem, cell.optimizer, cell.racks, full, steps, seeds)
