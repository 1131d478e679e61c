"""Machine code that several processes keep in one cache of numba, and the check of what it does."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mend import kernels
from mend.kernels import self_checks

FunctionIdentity = pytest.importorskip("numba.core.bytecode").FunctionIdentity

_PARTS = """
from types import FunctionType
from mend.kernels import compiled, part

def _inner(x):
{body}
    return x

def _outer(x):
    return inner(x)

def make(factor):
    here = dict(globals(), FACTOR=factor)
    here["inner"] = part(FunctionType(_inner.__code__, here, f"_by_{{factor}}"))
    return compiled("i8(i8)", FunctionType(_outer.__code__, here, f"_outer_{{factor}}"))
"""


def test_parts_kept_by_two_processes_are_not_mixed_up_by_a_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of a part had one name in machine code, and a process that loaded both ran the
    first one twice: eight racks merged fp32 slices as int8, all with the same wrong weights."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "cache"))
    # Too long to be inlined.
    body = "\n".join(f"    x = (x ^ (x >> {1 + i % 7})) * FACTOR + {i}" for i in range(60))
    (tmp_path / "mixed_up_parts.py").write_text(_PARTS.format(body=body))
    monkeypatch.syspath_prepend(tmp_path)
    make = import_module("mixed_up_parts").make
    kernels._numba()
    for factor in (3, 5):
        if not (child := os.fork()):  # as two ranks compile at once what both need
            FunctionIdentity._unique_ids = itertools.count(1)
            make(factor)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert len(list(tmp_path.rglob("*.nbc"))) == 2
    for factor in (3, 5):
        with np.errstate(over="ignore"):
            x = np.int64(1)
            for i in range(60):
                x = (x ^ (x >> (1 + i % 7))) * factor + i
        loaded = make(factor)
        assert loaded.stats.cache_hits
        assert loaded(1) == x


def test_forked_processes_number_what_they_compile_apart() -> None:
    kernels._numba()
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, str(next(FunctionIdentity._unique_ids)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    there = int(os.read(read, 100))
    here = next(FunctionIdentity._unique_ids)
    assert abs(there - here) > 1 << 20, "as unlikely as one in 2^27"


def broken(kernel: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Another last bit in the first element that it writes there."""

    def run(*arguments: Any) -> Any:
        result = kernel(*arguments)
        arguments[place].reshape(-1)[:1].view(np.uint8)[0] ^= 1
        return result

    return run


def checks() -> Iterator[
    tuple[Callable[..., Any], Callable[..., Any] | None, list[int], list[str]]
]:
    yield self_checks.check_merge, kernels.merge_kernel("float32"), [12, 13], ["float32"]
    yield self_checks.check_merge, kernels.merge_kernel("int8"), [12, 13], ["int8"]
    yield self_checks.check_offer, kernels.offer_kernel("int8"), [0, 5, 6], ["int8"]
    yield self_checks.check_apply, kernels.apply_kernel(), [0], []


def test_kernel_that_writes_another_bit_anywhere_fails_its_check() -> None:
    for check, kernel, places, names in checks():
        assert kernel is not None
        assert check(kernel, *names) is kernel
        for place in places:
            with pytest.raises(RuntimeError, match="NUMBA_CACHE_DIR"):
                check(broken(kernel, place), *names)


def test_kernel_of_another_codec_fails_its_check() -> None:
    with pytest.raises(RuntimeError, match="merge of bfloat16"):
        self_checks.check_merge(kernels.merge_kernel("int8"), "bfloat16")


@pytest.mark.parametrize(("module", "check"), [("merges", "merge"), ("offers", "offer")])
def test_kernel_that_fails_its_check_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, module: str, check: str
) -> None:

    def fail(kernel: object, codec: str) -> None:
        raise RuntimeError(f"other bits of {codec}")

    monkeypatch.setattr(f"mend.kernels.{module}.check_{check}", fail)
    load = getattr(kernels, f"{check}_kernel").__wrapped__
    with pytest.warns(UserWarning, match="slower: RuntimeError: other bits of int8"):
        assert load("int8") is None
