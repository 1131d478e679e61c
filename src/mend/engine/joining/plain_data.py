"""State dicts as bytes: plain values and tensors, in the format of the safetensors library.

Nothing is unpickled. `Packing` refuses a value of any other type and names its place and type.

The plain values are in the header, where each tensor is represented by its number. Dicts are
written in the order of their keys, so equal contents are equal bytes.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from mend.engine.compute.digest import DIGEST_BLOCK_BYTES, bytes_of
from mend.engine.compute.safetensors import LENGTH_BYTES, Entry, head_of, length_in, read_head
from mend.errors import StateRefused
from mend.fragment.shards import as_dtensor

HEADER_BYTES_MAX = 64 << 20
PORTION_BYTES = 16 << 20
"""Portion of a copy that one job of the pool makes."""

DEPTH_MAX = 64
"""Maximum nesting of dicts, lists and tuples."""

_INT64 = range(-(1 << 63), 1 << 63)

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Path = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """A tensor that was read, and the type of the device that it was on. For a DTensor: the local
    part of one rank, the `shape` of the whole and the `placements` as text."""

    tensor: Tensor
    device: str
    shape: tuple[int, ...] = ()
    placements: str = ""


def describe_path(path: Path) -> str:
    """A place in a state dict, in words: `optimizer['state'][0]['exp_avg']`."""
    return str(path[0]) + "".join(f"[{part!r}]" for part in path[1:])


# ------------------------------------------------------------------ writing


Each = Callable[[Sequence[Callable[[], object]]], object]


def one_by_one(jobs: Sequence[Callable[[], object]]) -> None:
    """Call every job in this thread."""
    for job in jobs:
        job()


class Packing:
    """Converts plain values and tensors to bytes. Raises StateRefused for a value of another type.
    The tensors are read by `write` and `digest`, not before."""

    def __init__(self, name: str, value: object) -> None:
        self._tensors: list[Tensor] = []
        tree = self._plain((name,), value)
        sizes = [tensor.nbytes for tensor in self._tensors]
        # Wide elements first, so that all of them lie at multiples of their size.
        order = sorted(range(len(sizes)), key=lambda i: -self._tensors[i].element_size())
        entries = dict[str, Entry]()
        self._places, end = dict[int, int](), 0
        for i in order:
            self._places[i], end = end, end + sizes[i]
            tensor = self._tensors[i]
            entries[str(i)] = Entry(_NAMES[tensor.dtype], (*tensor.shape,), (self._places[i], end))
        self._head = head_of(tree, entries)
        if (size := len(self._head) - LENGTH_BYTES) > HEADER_BYTES_MAX:
            raise StateRefused(f"{name} has plain values of {size} bytes; too many")
        self.size = len(self._head) + end

    def write(self, room_B: Tensor | None = None, each: Each = one_by_one) -> Tensor:
        """The bytes (uint8), written in one pass over the tensors: to the beginning of `room_B` if
        that is large enough, else to new memory. `each` runs all jobs that it is given, in any
        threads."""
        if room_B is None or room_B.numel() < self.size:
            room_B = torch.empty(self.size, dtype=torch.uint8, device="cpu")
        out_B, head = room_B[: self.size], len(self._head)
        out_B[:head] = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
        jobs = list[Callable[[], object]]()
        for i, tensor in enumerate(self._tensors):
            if tensor.numel():
                start = head + self._places[i]
                into_N = out_B[start : start + tensor.nbytes].view(tensor.dtype)
                if tensor.device.type != "cpu":  # on the current stream, which computed it
                    into_N.copy_(tensor.detach().reshape(-1))
                    continue
                if not tensor.is_contiguous():  # row by row, without a copy in between
                    jobs.append(partial(into_N.view(tensor.shape).copy_, tensor.detach()))
                    continue
                flat_N = tensor.detach().view(-1)
                step = PORTION_BYTES // flat_N.element_size()
                for first in range(0, flat_N.numel(), step):
                    part = slice(first, first + step)
                    jobs.append(partial(into_N[part].copy_, flat_N[part]))
        each(jobs)
        return out_B

    def digest(self) -> str:
        """`digest_of_state` of the bytes that `write` returns, without memory for them."""
        state_hash = xxhash.xxh3_128(self._head)
        for i in sorted(self._places, key=self._places.__getitem__):
            flat_N = self._tensors[i].detach().reshape(-1)
            step = DIGEST_BLOCK_BYTES // flat_N.element_size()
            for start in range(0, flat_N.numel(), step):
                state_hash.update(bytes_of(flat_N[start : start + step].cpu()))
        return state_hash.hexdigest()

    def _plain(self, path: Path, value: object) -> object:
        if len(path) > DEPTH_MAX:
            raise StateRefused(
                f"{describe_path(path)} lies {len(path)} levels deep; {DEPTH_MAX} can travel"
            )
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if value in _INT64 else {"t": "int", "v": str(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"t": "float", "v": str(value)}
        if type(value) is bytes:
            return {"t": "bytes", "v": base64.b64encode(value).decode()}
        if isinstance(value, Tensor):
            return self._tensor(path, value)
        if type(value) is np.ndarray:
            return {"t": "array", "v": self._tensor(path, _of_array(path, value))}
        if isinstance(value, dict) and (kind := _DICTS.get(type(value))):
            return {"t": kind, "v": self._items(path, value)}
        if type(value) in (list, tuple):
            items = [self._plain((*path, i), item) for i, item in enumerate(value)]  # type: ignore[arg-type, var-annotated]
            return items if type(value) is list else {"t": "tuple", "v": items}
        raise _refusal(path, value)

    def _items(self, path: Path, value: Mapping[object, object]) -> list[object]:
        keys = list(value)
        for key in keys:
            if type(key) not in (str, int, bool, float):
                raise _refusal((*path, key), key, "a key that is ")
        if type(value) is not OrderedDict:
            keys.sort(key=lambda key: (type(key).__name__, key))
        return [[self._plain(path, key), self._plain((*path, key), value[key])] for key in keys]

    def _tensor(self, path: Path, value: Tensor) -> object:
        more: dict[str, object] = {}
        device = value.device.type
        if (spread := as_dtensor(value)) is not None:
            more = {"shape": list(spread.shape), "placements": str(spread.placements)}
            value = spread.to_local()
        plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if not plain or value.dtype not in _NAMES:
            raise _refusal(path, value, f"{value.layout} of {value.dtype}, ")
        self._tensors.append(value)
        return {"t": "tensor", "v": len(self._tensors) - 1, "device": device, **more}


_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


def _of_array(path: Path, value: Any) -> Tensor:
    try:
        return torch.from_numpy(value.copy())
    except TypeError as error:
        raise _refusal(path, value, f"of {value.dtype}, ") from error


def _refusal(path: Path, value: object, more: str = "") -> StateRefused:
    kind = type(value)
    return StateRefused(
        f"{describe_path(path)} is {more}a {kind.__module__}.{kind.__qualname__}, which cannot "
        "travel: numbers, strings, bytes, lists, tuples, dicts, dense tensors and numpy arrays can"
    )


def check(name: str, value: object) -> None:
    """Raise StateRefused if the value cannot be packed."""
    Packing(name, value)


# ------------------------------------------------------------------ reading


def unpack(name: str, data_B: Tensor) -> Any:
    """The value that `Packing` wrote. Its tensors are `Carried` and share the memory of `data_B`.
    Raises StateRefused for other bytes."""
    try:
        return _Reading(data_B).value
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise StateRefused(f"{name} is damaged: {error!r}") from error


class _Reading:
    def __init__(self, data_B: Tensor) -> None:
        view = bytes_of(data_B)
        size = length_in(view)
        if size > min(HEADER_BYTES_MAX, len(view) - LENGTH_BYTES):
            raise ValueError(f"a header of {size} bytes")
        start = LENGTH_BYTES + size
        tree, entries = read_head(view[LENGTH_BYTES:start])
        self._tensors = {int(name): _sliced(data_B[start:], each) for name, each in entries.items()}
        self.value = self._value(msgspec.json.decode(tree), 1)

    def _value(self, found: object, depth: int) -> object:
        if depth > DEPTH_MAX + 2:
            raise ValueError("too deep")
        if isinstance(found, list):
            return [self._value(each, depth + 1) for each in found]
        if not isinstance(found, dict):
            return found
        kind, value = found["t"], found["v"]
        if kind == "tensor":
            return self._carried(found)
        if kind == "array":
            return self._carried(value).tensor.numpy().copy()
        if kind in ("int", "float"):
            return int(value) if kind == "int" else float(value)
        if kind == "bytes":
            return base64.b64decode(value, validate=True)
        if kind == "tuple":
            return tuple(self._value(each, depth + 1) for each in value)
        made = {name: of for of, name in _DICTS.items()}[kind]()
        for key, each in value:
            made[self._value(key, depth + 1)] = self._value(each, depth + 1)
        return made

    def _carried(self, found: Mapping[str, Any]) -> Carried:
        shape = tuple(int(size) for size in found.get("shape", ()))
        return Carried(
            self._tensors[found["v"]], str(found["device"]), shape, str(found.get("placements", ""))
        )


def _sliced(data_B: Tensor, entry: Entry) -> Tensor:
    dtype = DTYPES[entry.dtype]
    begin, end = entry.data_offsets
    numel = math.prod(entry.shape)
    if min(entry.shape, default=0) < 0 or not 0 <= begin <= end <= data_B.numel():
        raise ValueError(f"a tensor {entry}")
    if end - begin != numel * dtype.itemsize:
        raise ValueError(f"a tensor {entry}")
    if not numel:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    return data_B[begin:end].view(dtype).reshape(entry.shape)
