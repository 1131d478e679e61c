"""Turns determinism on and off: seeds, switches of torch, environment variables."""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mend.determinism import everywhere
from mend.determinism.coverage import Coverage
from mend.determinism.gemm import shapes_without_blas
from mend.determinism.reach import REACHED, put_in_place
from mend.errors import ConfigError, NotDeterministic, UsageError
from mend.types import whole_number

Level = Literal["run", "shape", "everywhere"]

logger = logging.getLogger("mend")

TINY_PARAMETERS = 50_000
"""A step of a smaller model is calls rather than arithmetic, of which level shape makes more."""

COSTS: dict[str, dict[str, str]] = {
    "run": {"CPU": "1.1 to 1.4 times a plain step", "GPU": "1.1 to 1.2 times"},
    "shape": {
        "CPU": "2 to 3.5 times a plain step",
        "GPU": "0.86 to 0.93 times a plain step; 2.3 times for GPT-2 124M without cuda_graph=True",
    },
    "everywhere": {"CPU": "1.9 to 3.1 times a plain step of fp32", "GPU": "2.2 times"},
}
"""Rough times of a training step by level and device. docs/determinism.md has the same."""

COST_OF_CALLS = (
    f"3 to 6 times below {TINY_PARAMETERS:,} parameters, 10 times for many rows of one vector each"
)
"""Level shape on the CPU besides."""

SEED_MAX = 2**32 - 1
"""numpy takes no larger one."""

PINNED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""Read by cuBLAS and NCCL when they start. A value that is set already stays if it is in ALLOWED;
the ring and the simple protocol add in one order for a given number of ranks."""

ALLOWED = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree"),
    "NCCL_PROTO": ("Simple", "LL", "LL128"),
}

UNSEEN = (
    "PYTHONHASHSEED: the order of a set of strings; export it before Python starts",
    "generators of your own (torch.Generator, numpy.random.default_rng): seed them yourself",
    "DataLoader(in_order=False), time limits and whatever else asks a clock",
    "torch.compile(mode='max-autotune'): picks kernels by their speed",
    "another GPU model, another version of torch, CUDA or NCCL, another number of threads",
)
"""Sources of other bits that no switch of a running process covers."""

_enabled: Determinism | None = None
_said: set[str] = set()
"""Lines of the log that this process has written."""


class Closes:
    """A context manager that ends with close()."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Determinism(Closes):
    """The switches set by enable(); close() or the end of a `with` restores them.

    `settings`: name -> value of all that is pinned, TF32 included. `unseen`: what is not covered.
    The state of the random generators is not restored.
    """

    def __init__(self, seed: int, level: Level) -> None:
        self.seed, self.level = seed, level
        self.settings: dict[str, str] = {}
        self._coverage: Coverage | None = None
        self.unseen: tuple[str, ...] = UNSEEN
        self._undo = ExitStack()

    @property
    def unreached(self) -> dict[str, int]:
        """Level shape: how often operators ran that have no order of mend's. In strict mode they
        raise instead."""
        return dict(self._coverage.unreached) if self._coverage else {}

    @property
    def slow_shapes(self) -> int:
        """Level shape: shapes of products whose order BLAS did not keep. They are computed one
        addition at a time, which is slow."""
        return len(shapes_without_blas())

    @property
    def is_of_this_thread(self) -> bool:
        """Whether close() can restore everything: level shape watches one thread."""
        return self._coverage is None or self._coverage in _get_current_dispatch_mode_stack()

    def close(self) -> None:
        """Restore every switch, in the thread that called enable(). A second call does nothing."""
        global _enabled
        if _enabled is self:
            _enabled = None
        self._undo.close()

    def note(self, what: str, remedy: str) -> None:
        """Refuse it where `strict`, and otherwise count it among what is not reached."""
        if self._coverage is not None:
            self._coverage.note(what, remedy)

    def put_kernels(self, strict: bool, leaf_rows: int) -> None:
        """Level shape: replace aten's kernels by mend's, and watch all other operators."""
        take_away, settings = put_in_place(leaf_rows)
        self._undo.callback(take_away)
        self._coverage = Coverage(REACHED, strict)
        self._undo.enter_context(self._coverage)
        self.settings |= {"kernels": "of mend.determinism, on the CPU", **settings}

    def put_portable_kernels(self, strict: bool) -> None:
        """Level everywhere: the same for its own kernels."""
        take_away, settings = everywhere.put_in_place()
        self._undo.callback(take_away)
        self._coverage = Coverage(everywhere.REACHED, strict, "everywhere")
        self._undo.enter_context(self._coverage)
        self.settings |= settings

    def put(self, name: str, value: Any, was: Any, setter: Callable[[Any], Any]) -> None:
        """Set a switch, remember it for close(), and list it."""
        self._undo.callback(setter, was)
        setter(value)
        self.settings[name] = str(value)


def enable(
    seed: int,
    level: Level = "run",
    *,
    strict: bool = True,
    tf32: bool = False,
    leaf_rows: int = 1,
) -> Determinism:
    """Seed everything and pin every switch, until close() or the end of a `with`.

    Level "run": on the same machine, with the same versions and numbers of ranks and threads, the
    same script gives the same bits. Level "shape" (on the CPU and on Hopper GPUs): the result for a
    sequence does not depend on what else is in the batch or on how the work is cut. Level
    "everywhere" (fp32; needs numba): it does not depend on the CPU or GPU, either.

    `strict`: an operation that has no deterministic kernel raises (torch says its name) in place of
    a warning; at level shape also one that has no order of mend's, in the thread that called this.
    `tf32`: let fp32 matmuls and convolutions on a GPU round their inputs to TF32; the same bits
    either way, fewer of them. `leaf_rows`: level shape on a GPU adds the tokens of so many rows of
    the batch in one chain when it computes the gradient of a weight: a power of two that divides
    every microbatch. More is faster; another number gives other bits.

    Raises ConfigError for a value that cannot be, UsageError where it is on already, and
    NotDeterministic, by name, for what it would have to set but cannot any more.
    """
    global _enabled
    if _enabled is not None:
        raise UsageError(
            f"determinism is enabled already (level {_enabled.level}, seed {_enabled.seed}); "
            "close() that one first"
        )
    seed = _check_seed(seed)
    if level not in get_args(Level):
        raise ConfigError("level", level, f"one of {', '.join(get_args(Level))}", "Name a level.")
    if leaf_rows < 1 or leaf_rows & (leaf_rows - 1):
        raise ConfigError("leaf_rows", leaf_rows, "a power of two", "Take 1, 2, 4 or 8.")
    state = Determinism(seed, level)
    try:
        _pin_environment(state)
        _pin_torch(state, strict, tf32)
        if level == "shape":
            state.put_kernels(strict, leaf_rows)
        elif level == "everywhere":
            state.put_portable_kernels(strict)
    except BaseException:
        state.close()
        raise
    seed_all(seed)
    _enabled = state
    state.settings["cost"] = _cost(state)
    _say_once(f"cost of {level}", f'mend level-{level} cost="{state.settings["cost"]}"')
    return state


def _cost(state: Determinism) -> str:
    """On a GPU where there is one that the level can use, otherwise on the CPU."""
    # device_count() starts no CUDA: a process that forks later can still use it in its children.
    on_gpu = torch.cuda.device_count() > 0
    if state.level == "shape":
        on_gpu = "leaf_rows" in state.settings  # its kernels are there
    device = "GPU" if on_gpu else "CPU"
    more = f"; {COST_OF_CALLS}" if (state.level, device) == ("shape", "CPU") else ""
    return f"{device}: {COSTS[state.level][device]}{more}"


def say_if_tiny(parameters: int) -> None:
    """Warn of the cost of a tiny model on the CPU at level shape."""
    if parameters < TINY_PARAMETERS:
        cost = "tiny on the CPU: 3 to 6 times a plain step"
        _say_once("tiny", f'mend level-shape parameters={parameters} cost="{cost}"')


def _say_once(kind: str, line: str) -> None:
    """Once in a process, and on one rank."""
    if kind not in _said and os.environ.get("RANK", "0") == "0":
        _said.add(kind)
        logger.warning("%s", line)


def enable_for_rack(level: Level | None, seed: int, rack: int) -> Determinism | None:
    """The part of mend_init for `determinism`; None where there is nothing to restore. Racks train
    on data of their own, so each has a seed of its own."""
    if level is None:
        return None
    seed = _check_seed(seed)
    if _enabled is None:
        return enable(seed_of(seed, rack), level)
    if _enabled.level != level:
        raise UsageError(
            f"mend_init was asked for determinism={level!r}, and level {_enabled.level} is enabled "
            "already; ask for that one, or leave one of the two out"
        )
    return None


def _check_seed(seed: object) -> int:
    number = whole_number(seed)
    if number is None or not 0 <= number <= SEED_MAX:
        rule = f"must be a whole number, 0 to {SEED_MAX}"
        raise ConfigError("seed", seed, rule, "Take another seed.")
    return number


def enabled() -> Determinism | None:
    """The switches that are on in this process; None: none are."""
    return _enabled


def seed_all(seed: int) -> None:
    """Seed Python, numpy, torch and its devices. Loader workers draw their seeds from torch's."""
    random.seed(seed)
    np.random.seed(seed)
    if _cpu_alone():  # 0.1 ms of every step otherwise: torch notes who asked for each device
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@cache
def _cpu_alone() -> bool:
    """Whether this build of torch knows no other device."""
    cuda, mps = torch.backends.cuda.is_built, torch.backends.mps.is_built
    return not (cuda() or mps() or torch.xpu._is_compiled())  # type: ignore[no-untyped-call]


def seed_of(seed: int, number: int) -> int:
    """The seed of a step or rack: 32 bits that depend on both numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4], "big")


def random_state() -> dict[str, Any]:
    """State of every generator that seed_all() seeds."""
    cuda = torch.cuda.get_rng_state_all() if _cuda_runs() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _pin_environment(state: Determinism) -> None:
    late = {"CUBLAS_WORKSPACE_CONFIG": _cuda_runs(), "NCCL_ALGO": _nccl_runs()}
    late["NCCL_PROTO"] = late["NCCL_ALGO"]
    for name, value in PINNED.items():
        was = os.environ.get(name)
        if was is None and late[name]:
            raise NotDeterministic(
                f"{name} is not set, and CUDA or NCCL has started already and reads it no more",
                f"call enable() earlier, or export {name}={value}",
            )
        if was is not None and was not in ALLOWED[name]:
            raise NotDeterministic(
                f"{name}={was} does not keep bits", f"unset it, or export {name}={value}"
            )
        state.put(name, value if was is None else was, was, _setter(name))


def _setter(name: str) -> Callable[[str | None], None]:
    def put(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    return put


def _cuda_runs() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _nccl_runs() -> bool:
    return dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend_config()


def _pin_torch(state: Determinism, strict: bool, tf32: bool) -> None:
    mode = 2 if strict else 1  # torch's own words: 2 raises, 1 warns
    was = torch.get_deterministic_debug_mode()
    state.put("deterministic_debug_mode", mode, was, torch.set_deterministic_debug_mode)
    precision = "high" if tf32 else "highest"
    before = torch.get_float32_matmul_precision()
    state.put("float32_matmul_precision", precision, before, torch.set_float32_matmul_precision)
    for name, value in (("deterministic", True), ("benchmark", False), ("allow_tf32", tf32)):
        backend = torch.backends.cudnn
        was_set = getattr(backend, name)
        state.put(f"cudnn.{name}", value, was_set, _attribute(backend, name))


def _attribute(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)
