"""What a round costs in training and beside it, in counts that no clock and no other work changes:
passes over the bytes, calls that let go of the interpreter's lock and take it again, page-locked
memory.

A training thread that launches kernels waits whenever another thread takes the lock. So a new pass,
or calls of smaller pieces, are seen here and not first on a GPU.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mend.codec import CODECS
from mend.codec.on_device import DeviceEncoder
from mend.config.settings import MendConfig
from mend.config.wiring import spare_vectors
from mend.engine import live_rank
from mend.engine.compute import merge_pass as merge_pass_module
from mend.engine.compute import offers as offers_module
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.vectors import PORTION_NUMEL
from mend.engine.trainer import model_access as model_access_module
from mend.fragment.device import Side
from mend.kernels import merge_kernel
from mend.merge import Average
from mend.outer import Nesterov
from mend.transport.bulk_client import STREAMS, BulkLane
from mend.transport.bulk_link import HolderEnd, ReaderEnd
from mend.transport.security import Channel, Secret, Secrets
from mend.types import SECOND, Member, offer_key
from tests.unit.engine.hand import Hand

PARTS = 4
NUMEL = PARTS * PORTION_NUMEL
BYTES = 4 * NUMEL

KERNELS = (
    (offers_module, "delta_kernel"),
    (offers_module, "squares_kernel"),
    (offers_module, "offer_kernel"),
    (merge_pass_module, "merge_kernel"),
    (model_access_module, "apply_kernel"),
)
OURS, TOKEN = b"1" * 32, b"0123456789abcdef"
KEY = offer_key(Member(0, 1), 0, 0, 1)


class Counts(TorchDispatchMode):
    """Calls by kind, and how often they touch BYTES: each array that one of them reads or writes is
    a pass, and one that it overwrites is one too. Torch's are counted in this thread, numpy's of
    arrays that are views of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self._touched = Counter[str](), Counter[str]()

    def count(self, kind: str, size: int) -> None:
        self.calls[kind] += 1
        self._touched[kind] += size

    def clear(self) -> None:
        self.calls.clear()
        self._touched.clear()

    @property
    def passes(self) -> dict[str, float]:
        """To a quarter."""
        found = {kind: round(4 * size / BYTES) / 4 for kind, size in self._touched.items()}
        return {kind: count for kind, count in found.items() if count}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        writes = "empty" not in func.name()  # nothing is touched yet
        if not func.is_view and writes:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            places = {(x.data_ptr(), x.nbytes) for x in (*tensors, *made)}
            self.count("torch", sum(size for _, size in places))
        return result


class Array(np.ndarray):
    """A view of a tensor that counts what numpy does with it."""

    count: Callable[[str, int], None]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        self._counts(*inputs, *more.get("out", ()))
        plain = {**more, "out": tuple(map(np.asarray, more["out"]))} if "out" in more else more
        return getattr(ufunc, method)(*map(np.asarray, inputs), **plain)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._counts(*args, *kwargs.values())
        return super().__array_function__(func, types, args, kwargs)

    def __setitem__(self, place: Any, values: Any) -> None:
        self._counts(self[place], values)
        super().__setitem__(place, values)

    def copy(self, *arguments: Any) -> Any:
        self._counts(self, self)
        return np.asarray(self).copy(*arguments)

    def astype(self, *arguments: Any, **more: Any) -> Any:
        self._counts(self, self)
        return np.asarray(self).astype(*arguments, **more)

    def _counts(self, *touched: Any) -> None:
        self.count("numpy", sum(x.nbytes for x in touched if isinstance(x, np.ndarray)))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    found = Counts()

    class Hash:
        """xxh3_128 that counts what it is fed."""

        def __init__(self) -> None:
            self._real = xxh3_128()

        def update(self, data: Any) -> None:
            found.count("hash", len(data))
            self._real.update(data)

        def digest(self) -> bytes:
            return self._real.digest()

        def hexdigest(self) -> str:
            return self._real.hexdigest()

    def counted(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(*names: str) -> Any:
            kernel = load(*names)

            def call(*arguments: Any) -> Any:
                arguments = tuple(np.asarray(x) if isinstance(x, Array) else x for x in arguments)
                arrays = [each for each in arguments if isinstance(each, np.ndarray)]
                places = {(each.ctypes.data, each.nbytes) for each in arrays if each.nbytes}
                size = sum(size for _, size in places)
                if load is merge_kernel:  # the payloads are given as addresses
                    size += len(arguments[0]) * 4 * len(arguments[12])
                found.count("kernel", size)
                return kernel(*arguments)

            return None if kernel is None else call

        return loaded

    xxh3_128 = xxhash.xxh3_128
    monkeypatch.setattr(xxhash, "xxh3_128", Hash)
    numpy_of, array = Tensor.numpy, type("Counted", (Array,), {"count": staticmethod(found.count)})
    monkeypatch.setattr(Tensor, "numpy", lambda *args, **more: numpy_of(*args, **more).view(array))
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker of mend has
    yield found
    torch.set_num_threads(threads)


def numerics_of(codec: str, momentum: float = 0.0, **more: Any) -> Numerics:
    return Numerics(CODECS[codec](), Average(), Nesterov(1.0, momentum), **more)


def values(seed: int) -> Tensor:
    tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(seed))
    return tile.repeat(NUMEL // tile.numel())


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, lambda *_: None)


# --------------------------------------------------------------------------- encode and merge

Cost = tuple[dict[str, int], dict[str, float]]
"""(calls of PARTS portions, passes over the fp32 bytes of the vector)"""


@pytest.mark.parametrize(
    ("codec", "cost"),
    [
        # Kernels read the anchor, and overwrite the snapshot; with a lossy codec they also write
        # the payload and what it leaves out. Each thread gets two calls, of portions of which the
        # payload is hashed at once.
        ("float32", ({"kernel": PARTS, "hash": PARTS}, {"kernel": 2, "hash": 1})),
        ("bfloat16", ({"kernel": PARTS // 2, "hash": PARTS // 2}, {"kernel": 3.5, "hash": 0.5})),
        ("int8", ({"kernel": PARTS // 2, "hash": 1}, {"kernel": 3.25, "hash": 0.25})),
    ],
)
def test_an_offer_is_one_compiled_pass_and_one_checksum(
    counts: Counts, codec: str, cost: Cost
) -> None:
    pytest.importorskip("numba")
    numerics = numerics_of(codec)
    anchor, snapshot = numerics.genesis(values(1)), values(2)
    counts.clear()
    with counts:
        numerics.encode(snapshot, None, anchor.values)
    assert (dict(counts.calls), counts.passes) == cost


@pytest.mark.parametrize("most", [2, 3])
def test_a_large_offer_takes_the_lock_for_a_bounded_number_of_calls(
    counts: Counts, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits."""
    pytest.importorskip("numba")
    numerics = numerics_of("float32")
    anchor = numerics.genesis(values(1))
    plain = numerics.encode(values(2), None, anchor.values)
    monkeypatch.setattr(offers_module, "CALLS_MAX", most)
    counts.clear()
    with counts:
        few = numerics.encode(values(2), None, anchor.values)
    assert counts.calls["kernel"] == 2
    assert torch.equal(few.payload, plain.payload)
    assert (few.checksum, few.norm, few.unsent, few.length) == (
        plain.checksum, plain.norm, plain.unsent, plain.length,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("momentum", "cost"),
    [
        # The deltas of three racks, the anchor and the next anchor; with momentum two vectors more.
        # The digest is made on the way.
        (0.0, ({"kernel": 1}, {"kernel": 5})),
        (0.9, ({"kernel": 1}, {"kernel": 7})),
    ],
)
def test_a_merge_is_one_compiled_call_that_makes_the_digest(
    counts: Counts, momentum: float, cost: Cost
) -> None:
    pytest.importorskip("numba")
    assert _merged(counts, momentum, (0.5, 0.25, 0.25)) == cost


@pytest.mark.parametrize(
    ("momentum", "cost"),
    [
        (0.0, ({"torch": 7 * PARTS, "hash": PARTS}, {"torch": 9, "hash": 1})),
        (0.9, ({"torch": 11 * PARTS, "hash": 2 * PARTS}, {"torch": 17, "hash": 2})),
    ],
)
def test_without_numba_a_merge_takes_so_many_calls_of_torch(
    counts: Counts, monkeypatch: pytest.MonkeyPatch, momentum: float, cost: Cost
) -> None:
    without_kernels(monkeypatch)
    assert _merged(counts, momentum, (0.5, 0.5)) == cost


def test_without_numba_an_offer_takes_so_many_calls_of_torch(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernels(monkeypatch)
    numerics = numerics_of("float32")
    anchor, snapshot = numerics.genesis(values(1)), values(2)
    counts.clear()
    with counts:
        numerics.encode(snapshot, None, anchor.values)
    assert dict(counts.calls) == {"torch": 4 * PARTS, "hash": PARTS}
    assert counts.passes == {"torch": 3, "hash": 1}


def _merged(counts: Counts, momentum: float, weights: tuple[float, ...]) -> Cost:
    numerics = numerics_of("float32", momentum)
    anchor = numerics.genesis(values(1))
    payloads = [values(seed + 2).view(torch.uint8) for seed in range(len(weights))]
    counts.clear()
    with counts:
        numerics.merge(payloads, weights, anchor, 1)
    return dict(counts.calls), counts.passes


# --------------------------------------------------------------------------- capture and apply


class Training(Hand):
    """Its worker waits for `applies`, so that what is counted is the training thread's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(numel=NUMEL, **options)

    def encode(self) -> None:
        """Not yet."""

    def ends_step(self, counts: Counts) -> Cost:
        """What mend does in the hook of the optimizer's next step."""
        self.update(0.25)
        counts.clear()
        with counts:
            self.counted()
        return dict(counts.calls), counts.passes

    def captures(self, counts: Counts) -> Cost:
        """At the fourth step."""
        self.step(3)
        cost = self.ends_step(counts)
        assert len(self.offers) == 1
        return cost

    def applies(self, counts: Counts, *, named: bool) -> tuple[Cost, Cost]:
        """What the loop does when the result is there, and the training thread two steps behind the
        capture."""
        super().encode()
        anchor = self.decide(0.5, names=named, publish=False)
        self.step(1)
        counts.clear()
        with counts:
            self.published.publish(0, anchor)
        there = dict(counts.calls), counts.passes
        cost = self.ends_step(counts)
        assert self.fragment_state().anchor is anchor
        return there, cost


BLOCKS = 4 * PARTS
"""Of an apply without numba."""

NOTHING: Cost = ({}, {})
"""Of the bytes of a fragment."""


@pytest.mark.parametrize(("named", "passes"), [(True, 4), (False, 3)])
def test_a_capture_is_one_copy_and_an_apply_one_compiled_pass(
    counts: Counts, named: bool, passes: int
) -> None:
    """The weights and where they go; then the weights, the old and the new anchor and, where the
    new one has it, the own offer."""
    pytest.importorskip("numba")
    training = Training()
    assert training.captures(counts) == ({"torch": PARTS}, {"torch": 2})
    cost = {"kernel": PARTS}, {"kernel": passes}
    assert training.applies(counts, named=named) == (NOTHING, cost)


def test_a_capture_that_training_waits_for_is_encoded_in_the_same_pass_as_one_that_it_does_not(
    counts: Counts,
) -> None:
    """By this thread, each portion behind its copy."""
    pytest.importorskip("numba")
    cost = {"torch": PARTS, "kernel": PARTS, "hash": PARTS}, {"torch": 2, "kernel": 2, "hash": 1}
    assert Training(overlapped=False).captures(counts) == cost


@pytest.mark.parametrize(
    ("apply_mode", "named", "cost"),
    [
        ("carry", True, ({"torch": 3 * BLOCKS}, {"torch": 8})),
        ("carry", False, ({"torch": 2 * BLOCKS}, {"torch": 6})),
        ("overwrite", True, ({"torch": PARTS}, {"torch": 2})),
        ("blend", True, ({"torch": 3 * BLOCKS}, {"torch": 7})),
    ],
)
def test_without_numba_an_apply_takes_so_many_calls_of_torch(
    counts: Counts, monkeypatch: pytest.MonkeyPatch, apply_mode: str, named: bool, cost: Cost
) -> None:
    """In blocks that stay in the cache."""
    without_kernels(monkeypatch)
    training = Training(apply_mode=apply_mode)
    assert training.captures(counts) == ({"torch": PARTS}, {"torch": 2})
    assert training.applies(counts, named=named) == (NOTHING, cost)


@pytest.mark.parametrize(
    ("apply_mode", "named", "there", "applied"),
    [
        # Up: the old anchor, the delta that is subtracted from it, and the new anchor in its place.
        ("carry", True, ({"torch": 4}, {"torch": 8}), ({"torch": 2}, {"torch": 4})),
        ("carry", False, ({"torch": 2}, {"torch": 4}), ({"torch": 2}, {"torch": 4})),
        ("overwrite", True, ({"torch": 1}, {"torch": 2}), ({"torch": 1}, {"torch": 2})),
        ("blend", True, ({"torch": 1}, {"torch": 2}), ({"torch": 3}, {"torch": 5})),
    ],
)
def test_on_a_device_the_training_stream_waits_for_one_copy_and_one_move(
    counts: Counts, apply_mode: str, named: bool, there: Cost, applied: Cost
) -> None:
    """A capture goes to a copy on the device, and from there to the host. The new anchor is brought
    when it is there, not when it is due."""
    training = Training(side=Side(torch.device("cpu")), apply_mode=apply_mode)
    assert training.captures(counts) == ({"torch": 2}, {"torch": 4})
    assert training.applies(counts, named=named) == (there, applied)


def test_a_device_that_encodes_copies_the_weights_once_and_brings_the_payload_alone(
    counts: Counts,
) -> None:
    """The anchor of the first capture is brought once; that of the next is there."""
    offers = Counter[str]()

    def kernel(*vectors: Any) -> None:
        """In place of the compiled one."""
        offers["calls"] += 1
        vectors[-1].fill_(0)

    encoder = DeviceEncoder(CODECS["int8"](), kernel)
    training = Training(side=Side(torch.device("cpu")), payload="int8", on_device=encoder)
    assert training.captures(counts) == ({"torch": 4}, {"torch": 4.5})
    there, applied = training.applies(counts, named=True)
    assert (there, applied) == (({"torch": 4}, {"torch": 8}), ({"torch": 2}, {"torch": 4}))
    training.step(1)
    assert training.ends_step(counts) == ({"torch": 3}, {"torch": 2.5})
    assert offers["calls"] == 2


# --------------------------------------------------------------------------- lane


class Wire(socket.socket):
    """A socket that counts its calls."""

    calls: Counter[str]

    def recv_into(self, *arguments: Any, **more: Any) -> int:
        self.calls["receive"] += 1
        return super().recv_into(*arguments, **more)

    def sendall(self, *arguments: Any) -> None:
        self.calls["send"] += 1
        super().sendall(*arguments)


@pytest.mark.parametrize(
    ("protected", "holder", "reader"),
    [
        # A header and a chunk, or the header and the pieces of 1 MiB, two of which cross at once,
        # the first two from the holder together with the header.
        (False, {"send": 0}, {"receive": 2}),
        (True, {"send": 2, "seal": 1 + 4}, {"receive": 1 + 2, "open": 1 + 4}),
    ],
)
def test_a_chunk_takes_so_many_calls_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
    protected: bool,
    holder: dict[str, int],
    reader: dict[str, int],
) -> None:
    calls: dict[str, Counter[str]] = {"holder": Counter(), "reader": Counter()}
    chunk = memoryview(bytearray(4 << 20))
    ends = [Wire(fileno=each.detach()) for each in socket.socketpair()]
    for end, name in zip(ends, calls, strict=True):
        end.calls = calls[name]
    for name in ("seal", "open"):
        _count_calls(monkeypatch, name, calls)

    def serve() -> None:
        end = HolderEnd(ends[0], TOKEN, Secrets([OURS]) if protected else None)
        assert end.greet()
        assert end.request(ends[0].recv(end.request_bytes)) is not None
        calls["holder"].clear()
        end.give(len(chunk), KEY, 0, chunk)

    serving = threading.Thread(target=serve, name="holder")
    serving.start()
    pull = ReaderEnd(ends[1], TOKEN, Secret(OURS) if protected else None)
    pull.ask(KEY, 0, len(chunk))
    calls["reader"].clear()
    header = pull.header(KEY, 0)
    assert pull.body(KEY, 0, header.digest, memoryview(bytearray(len(chunk))))
    serving.join()
    if not protected:
        calls["holder"].pop("send")  # the rest of a chunk, as often as the system takes a part
        holder = {}
    assert (calls["holder"], calls["reader"]) == (holder, reader)
    for each in ends:
        each.close()


def _count_calls(
    monkeypatch: pytest.MonkeyPatch, name: str, calls: dict[str, Counter[str]]
) -> None:
    real = getattr(Channel, name)

    def call(channel: Channel, *arguments: Any) -> None:
        side = "holder" if threading.current_thread().name == "holder" else "reader"
        calls[side][name] += 1
        real(channel, *arguments)

    monkeypatch.setattr(Channel, name, call)


# --------------------------------------------------------------------------- a pull


CALLS = ("recv", "recv_into", "sendall", "sendmsg")


@pytest.mark.parametrize(("protected", "each_mib"), [(False, 2.75), (True, 6.5)])
async def test_a_pull_wakes_the_loop_once_and_takes_so_many_calls_per_mib(
    monkeypatch: pytest.MonkeyPatch, protected: bool, each_mib: float
) -> None:
    """Of both sides together, and not the first pull: then threads and connections are there, and
    requests are large from the beginning."""
    size, calls, begun = 64 << 20, Counter[str](), threading.Thread.start
    data, into = memoryview(bytearray(size)), memoryview(bytearray(size))
    secrets = Secrets([OURS]) if protected else None
    settings: Any = {"token": TOKEN, "secrets": secrets, "stall_ns": 600 * SECOND}
    holder, reader = (BulkLane("127.0.0.1", None, **settings) for _ in range(2))
    holder.serve(KEY, data)
    while len(reader._threads._free) < STREAMS or len(reader._idle[holder.address]) < STREAMS:
        await reader.fetch([holder.address], KEY, "", into)
        await asyncio.sleep(0.05)  # the threads have told, and now become free
    for owner, names in ((socket.socket, CALLS), (Channel, ("seal", "open"))):
        for name in names:
            monkeypatch.setattr(owner, name, _counted(getattr(owner, name), name, calls))
    monkeypatch.setattr(threading.Thread, "start", _counted(begun, "start", calls))
    loop = asyncio.get_running_loop()
    wake = _counted(loop.call_soon_threadsafe, "wake", calls)
    monkeypatch.setattr(loop, "call_soon_threadsafe", wake)
    await reader.fetch([holder.address], KEY, "", into)
    for lane in (reader, holder):
        lane.close()
    assert (calls.pop("wake"), calls.pop("start", 0)) == (1, 0)
    assert sum(calls.values()) <= each_mib * size / (1 << 20), calls


def _counted(real: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        calls[name] += 1
        return real(*arguments, **more)

    return call


# --------------------------------------------------------------------------- page-locked memory


class Pin:
    """Counts the bytes that are locked."""

    def __init__(self) -> None:
        self.locked = 0

    def lock(self, address: int, size: int) -> None:
        self.locked += size

    def unlock(self, address: int) -> None:
        pass


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounds_lock_no_memory_that_was_not_locked_at_the_start(momentum: float) -> None:
    """Locking takes longer than a round, and every launch of a kernel waits for it."""
    fragments, numel, pin = 4, 1 << 18, Pin()
    config = MendConfig(
        racks=2, sync_period_steps=16, overlap_steps=4, fragments=fragments, sideband_peers={},
        codec="float32",
    )  # fmt: skip
    numerics = numerics_of("float32", momentum, spare=spare_vectors(config), pin=pin)
    anchors = [numerics.genesis(torch.ones(numel)) for _ in range(fragments)]
    fragment_states: Any = [SimpleNamespace(anchor=each, owned=each) for each in anchors]
    ahead = [
        numerics.buffers.empty(numel)
        for numel in live_rank._numels_ahead(numerics, fragment_states)
    ]
    del ahead
    del fragment_states  # it holds the first anchors
    at_start = pin.locked
    for version in range(1, 6):
        for fragment in range(fragments):
            anchors[fragment] = _round(numerics, anchors[fragment], version)
    assert pin.locked == at_start


def _round(numerics: Numerics, anchor: Anchor, version: int) -> Anchor:
    """The vectors of a capture, an offer, a pull and a merge, which end with the round."""
    snapshot = numerics.buffers.empty(anchor.numel)
    snapshot.fill_(0.5)
    offer = numerics.encode(snapshot, None, anchor.values)
    pulled = numerics.buffers.empty(offer.payload.numel(), torch.uint8)
    pulled.copy_(offer.payload)
    return numerics.merge([offer.payload, pulled], (0.5, 0.5), anchor, version)
