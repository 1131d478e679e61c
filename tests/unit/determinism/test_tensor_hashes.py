"""Hashes that are made where a tensor is; the code for a GPU runs on the CPU here. The kernel:
test_hash_kernels.py."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor, nn

from mend.determinism import enable, tensor_hashes
from mend.determinism.comparison import compare, recording_of
from mend.determinism.recorder import Recorder
from mend.determinism.tensor_hashes import (
    CHUNK_BYTES,
    Kernel,
    Pending,
    TensorHashes,
    chunks_of,
    row_sums,
    texts_of,
)
from tests.process import planted


def sums_of_chunks(chunks_C3: Tensor) -> Tensor:
    """What the kernel computes, by the definition."""
    found = []
    for address, size, first in chunks_C3.tolist():
        octets = torch.zeros(1, 8 * first + size, dtype=torch.uint8)
        if size:
            octets[0, 8 * first :] = torch.frombuffer(
                bytearray(ctypes.string_at(address, size)), dtype=torch.uint8
            )
        before = torch.zeros(1, 8 * first, dtype=torch.uint8)
        found.append(row_sums(octets) - row_sums(before))
    return torch.cat(found)


KERNELS = [None, sums_of_chunks]
by_any_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=["torch", "chunks"])


def device_hashes(kernel: Kernel | None = None) -> TensorHashes:
    return TensorHashes(lambda tensor: True, kernel)


def hash_of(tensor: Tensor, kernel: Kernel | None = None) -> str:
    hashes = device_hashes(kernel)
    pending = hashes.whole(tensor)
    assert isinstance(pending, Pending)
    assert str(pending) == "", "it is on its device until it is fetched"
    hashes.fetch()
    return str(pending)


def test_hash_changes_with_every_bit_and_place() -> None:
    x = torch.arange(37, dtype=torch.float32)
    found = {hash_of(x)}
    for place in range(37):
        for bit in (0, 22, 31):
            other = x.clone()
            other.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            found.add(hash_of(other))
    assert len(found) == 1 + 37 * 3
    assert len(hash_of(x)) == 16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2).flip(0)),
        (torch.ones(8), torch.full((8,), 2.0)),
        (torch.zeros(8), torch.full((8,), -0.0)),
    ],
)
def test_hash_sees_what_torch_hash_tensor_does_not(one: Tensor, other: Tensor) -> None:
    # The reason that torch.hash_tensor is not used: it is the XOR of the elements.
    if hasattr(torch, "hash_tensor"):
        assert torch.equal(torch.hash_tensor(one), torch.hash_tensor(other))
    assert hash_of(one) != hash_of(other)


@by_any_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
def test_hash_does_not_depend_on_memory(dtype: torch.dtype, kernel: Kernel | None) -> None:
    x = torch.arange(35).to(dtype).view(5, 7)
    padded = torch.zeros(6, 9, dtype=dtype)
    padded[1:, 1:8] = x
    layouts = (x, padded[1:, 1:8], x.t().contiguous().t(), torch.cat([x[:1], x])[1:])
    assert {hash_of(each, kernel) for each in layouts} == {hash_of(x)}
    assert hash_of(torch.zeros(0, 3), kernel) == "0" * 16


@by_any_kernel
def test_hash_is_of_the_values_that_a_lazy_tensor_stands_for(kernel: Kernel | None) -> None:
    x = torch.randn(5, 3, dtype=torch.complex64)
    assert hash_of(x.conj(), kernel) == hash_of(x.conj().resolve_conj()) != hash_of(x)
    assert hash_of(x.conj().imag, kernel) == hash_of((-x.imag).clone())


@by_any_kernel
def test_many_hashes_are_started_together_before_their_tensors_change(
    kernel: Kernel | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_hashes, "CHUNK_BYTES", 64)
    tensors = [torch.randn(size) for size in (1, 0, 33, 7, 200)]
    expected = [hash_of(each) for each in tensors]
    hashes = device_hashes(kernel)
    pending = [hashes.whole(each) for each in tensors]
    hashes.launch()
    for each in tensors:
        each.zero_()
    pending.append(hashes.whole(tensors[2]))
    hashes.fetch()
    assert list(map(str, pending)) == [*expected, hash_of(torch.zeros(33))]


def test_memory_that_waits_for_a_launch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # DTensors are gathered in portions, so that the whole model never is in memory at once.
    monkeypatch.setattr(tensor_hashes, "ASKED_BYTES_MAX", 100)
    hashes, held = device_hashes(), []
    for _ in range(6):
        hashes.whole(torch.randn(4, 3).t())
        held.append(sum(each.memory.nbytes for each in hashes._asked))
    assert held == [48, 96, 0, 48, 96, 0]


def test_chunks_cover_every_row_once() -> None:
    chunks, starts = chunks_of([(0, 1, 4), (1 << 20, 2, CHUNK_BYTES + 8), (8, 1, 0)])
    assert chunks.tolist() == [
        [0, 4, 0],
        [1 << 20, CHUNK_BYTES, 0], [(1 << 20) + CHUNK_BYTES, 8, CHUNK_BYTES // 8],
        [(1 << 20) + CHUNK_BYTES + 8, CHUNK_BYTES, 0],
        [(1 << 20) + 2 * CHUNK_BYTES + 8, 8, CHUNK_BYTES // 8],
        [8, 0, 0],
    ]  # fmt: skip
    assert starts.tolist() == [0, 1, 3, 5]


@by_any_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_their_hashes_wherever_they_are(
    kernel: Kernel | None, dtype: torch.dtype
) -> None:
    x = torch.randn(4, 3, 5).to(dtype)
    hashes = device_hashes(kernel)
    whole, half = hashes.rows(x, 4), hashes.rows(x[2:], 2)
    hashes.fetch()
    assert len(str(whole)) == 4 * 16
    assert str(whole)[32:] == str(half)
    assert str(whole) == "".join(map(hash_of, x))
    assert texts_of({"in": [[2, half]]}) == {"in": [[2, str(half)]]}


def test_large_tensors_are_mixed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    octets = torch.randint(0, 256, (3, 8 * 11), dtype=torch.uint8)
    whole = row_sums(octets)
    monkeypatch.setattr(tensor_hashes, "WORDS_MAX", 6)
    assert torch.equal(row_sums(octets), whole)


def test_a_step_is_fetched_once_and_finds_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    fetch = TensorHashes.fetch

    def counted(self: TensorHashes) -> None:
        fetched.append(sum(len(each.asked) for each in self._started))
        fetch(self)

    monkeypatch.setattr(TensorHashes, "fetch", counted)

    def recorded(detail: int) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        with Recorder(found.append, detail=(detail, detail), hashes=device_hashes()):
            planted.train("atomic")
        return found

    runs = [recording_of(recorded(2)) for _ in range(2)]
    assert len(fetched) == 2 * 3, "one for each step"
    assert min(fetched) > 0
    finding = compare([runs[0]], [runs[1]])
    assert finding is not None
    assert finding.operator == "planted.atomic_sum.default"
    plain = [recording_of(recorded(0)) for _ in range(2)]
    assert plain[0].steps[1] == plain[1].steps[1]


def test_hashes_are_made_at_level_shape() -> None:
    """Its own kernels replace sums there, and refuse what has no order."""
    x = torch.randn(6, 5)
    before = hash_of(x)
    with enable(3, "shape"):
        assert hash_of(x) == before


def test_rows_of_every_call_of_the_model_are_recorded() -> None:
    found: list[dict[str, object]] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 2)
    with Recorder(found.append, rows=True):
        for parts in (1, 2):
            for part in x.chunk(parts):
                model(part).sum().backward()
            with torch.no_grad():
                model(x)  # an evaluation is no part of the step
            optimizer.step()
    whole, halves = (each["calls"] for each in found[1:])
    assert [count for count, _ in whole] == [4]  # type: ignore[attr-defined]
    assert [count for count, _ in halves] == [2, 2]  # type: ignore[attr-defined]
    assert whole[0][1] == halves[0][1] + halves[1][1]  # type: ignore[index]
    assert found[1]["devices"] == ["cpu"]
    assert found[1]["level"] == "none"
