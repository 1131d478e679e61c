"""Records digests of an unchanged training script: of every step, and of every operator of a chosen
step. Uses torch's global hooks; changes no bit, draws no random number, and hands its records to a
function.

A step is one call of any torch optimizer's step(). Entries of a step are in the order of execution;
`compare` of comparison.py reads them.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from functools import cache
from types import FrameType
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from mend.determinism.digests import pieces, plain_name
from mend.determinism.enabling import enabled
from mend.determinism.sharding import whole_tensor
from mend.determinism.tensor_hashes import TensorHashes, texts_of

FORMAT = 2

Write = Callable[[dict[str, Any]], None]
"""Takes one record: the header, a step, or an entry of a step. JSON can hold each."""

HASH_SEED_CHOSEN = "HASH_SEED_CHOSEN_BY_MEND"
"""Variable of runs whose PYTHONHASHSEED was set in place of Python's random one."""

MODULE = "(module)"
"""The operator of an entry that stands for a whole call of a module."""

UNDEFINED = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
)
"""Operators whose result holds whatever was in memory."""

OVERWRITES = frozenset(
    ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "set_")
)
"""Operators that write their first argument and do not read it."""

WAITED = ("allreduce", "allgather", "_allgather", "reduce_scatter", "_reduce_scatter", "alltoall")
"""Collectives whose result is waited for, so that it can be read. All ranks run each of them."""

NUMBERS_MAX = 64
"""Characters of an operator's numbers; of more the hash is kept."""

_LAST_SEQUENCE_NR = (1 << 64) - 1
"""That of an AccumulateGrad node."""


class Recorder:
    """Records the steps up to `last` (0: all), and every operator of steps `detail` (first, last).

    `write` gets a header at once, then the entries of each step and its record. After step `last`
    the script is ended by SystemExit. Forked children (loader workers) record nothing. `rows`: also
    record which rows of the batch every call of the model was given. A step waits for its device
    once, when it ends.
    """

    def __init__(
        self,
        write: Write,
        *,
        last: int = 0,
        detail: tuple[int, int] = (0, 0),
        rows: bool = False,
        hashes: TensorHashes | None = None,
    ) -> None:
        self._write, self._last, self._detail, self._with_rows = write, last, detail, rows
        self.hashes = TensorHashes() if hashes is None else hashes
        self._pid, self._undo, self._step = os.getpid(), ExitStack(), 1
        self._entries: list[dict[str, Any]] = []
        self._losses: list[Any] = []
        self._calls: list[list[Any]] = []
        self._root: nn.Module | None = None
        self._names: dict[int, str] = {}
        self._before: dict[str, Any] = {}
        self._trace = _Trace(self)
        write(header())

    def __enter__(self) -> Recorder:
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._naming = register_module_forward_pre_hook(self._name_parameters)
        hooks.append(self._naming)
        if self._detail[1]:
            hooks += [
                register_module_forward_pre_hook(self._trace.enter_module),
                register_module_forward_hook(self._trace.leave_module, always_call=True),
            ]
            self._undo.enter_context(self._trace)
            self._wrap_calls(self._trace.with_keywords)
        if self._with_rows:
            self._wrap_calls(self._noting_rows)
        for hook in hooks:
            self._undo.callback(hook.remove)
        backward, autograd = torch.autograd.backward, torch.autograd

        def with_loss(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.here:
                with self._trace.aside():
                    wholes = [whole_tensor(each.detach()) for each in _tensors(tensors)]
                    self._losses += [self.hashes.whole(each) for each in wholes]
            return backward(tensors, *args, **kwargs)

        autograd.backward = with_loss
        self._undo.callback(setattr, autograd, "backward", backward)
        return self

    def __exit__(self, *fault: object) -> None:
        self._undo.close()

    @property
    def here(self) -> bool:
        return os.getpid() == self._pid

    @property
    def detailed(self) -> bool:
        """Whether every operator is recorded now."""
        return self._detail[0] <= self._step <= self._detail[1] and self.here

    def _wrap_calls(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """torch's global hooks are not given what a module is called with by name."""
        self._undo.callback(setattr, nn.Module, "__call__", nn.Module.__call__)
        nn.Module.__call__ = wrap(nn.Module.__call__)  # type: ignore[method-assign]

    def _name_parameters(self, module: nn.Module, args: Any) -> None:
        """The outermost module that holds a parameter runs first, in the first step."""
        if self._step > 1:
            self._naming.remove()
        elif self.here:
            for name, parameter in module.named_parameters():
                self._names.setdefault(id(parameter), plain_name(name))

    def _noting_rows(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._root is None and self.here and next(module.parameters(), None) is not None:
                self._root = module
            if module is self._root:
                self._note_rows(_tensors((args, kwargs)))
            return call(module, *args, **kwargs)

        return called

    def _note_rows(self, tensors: Sequence[Tensor]) -> None:
        batch = next((each for each in tensors if each.dim() and each.shape[0]), None)
        if batch is None or not torch.is_grad_enabled() or not self.here:
            return
        with self._trace.aside():
            self._calls.append([batch.shape[0], self.hashes.rows(batch, batch.shape[0])])

    def entry(self, record: dict[str, Any]) -> None:
        self._entries.append({"step": self._step, **record})

    def name_of(self, parameter: object, number: int) -> str:
        return self._names.get(id(parameter), f"parameter {number}")

    def _parameters(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        every = [each for group in optimizer.param_groups for each in group["params"]]
        return [(self.name_of(each, number), each) for number, each in enumerate(every)]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.here:
            return
        with self._trace.aside():
            named = self._parameters(optimizer)
            gradients = [(name, each.grad) for name, each in named if each.grad is not None]
            self._before = {"gradients": self._pieces(gradients)}
            if self._step == 1:
                self._before["start"] = self._pieces(named)
        self._trace.optimizer = type(optimizer).__name__

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.here:
            return
        self._trace.optimizer = ""
        with self._trace.aside():
            named = self._parameters(optimizer)
            states = [(name, optimizer.state.get(each, {})) for name, each in named]
            made = {"weights": self._pieces(named), "optimizer": self._pieces(states)}
            self.hashes.fetch()
        record = {"step": self._step, "end": True, "losses": self._losses, **_setting()}
        record["devices"] = sorted({each.device.type for _, each in named})
        if self._with_rows:
            record["calls"] = self._calls
        for part, each in (self._before | made).items():
            record |= self._digests(part, each)
        for every in (*self._entries, record):
            self._write(texts_of(every))
        self._entries, self._losses, self._calls = [], [], []
        self._trace.begin()
        done, self._step = self._step, self._step + 1
        if done == self._last:
            raise SystemExit(0)

    def _pieces(self, named: Sequence[tuple[str, Any]]) -> list[list[Any]]:
        """[name, what the value is made of], with hashes that may be pending."""
        made = pieces([value for _, value in named], self.hashes.whole)
        return [[name, each] for (name, _), each in zip(named, made, strict=True)]

    def _digests(self, part: str, named: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """One digest, and one per name where names may be asked for."""
        each = [[name, _digest_of(made)] for name, made in named]
        whole = {part: _digest_of([hashed for _, hashed in each])}
        return whole | ({f"{part} by name": each} if self.detailed or part == "start" else {})


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators of a step: hashes of what goes in and of what comes out, and whose they are.

    An operator of the backward pass belongs to the module that ran when its node of the graph was
    made: nodes are numbered in the order of the forward pass.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder, self.optimizer, self._busy = recorder, "", False
        self._modules: dict[int, str] = {}
        self._stack: list[tuple[str, list[Any]]] = []
        self._keywords: dict[str, Any] = {}
        self.begin()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def begin(self) -> None:
        """A new step: no call of the model yet."""
        self._call, self._rows = 0, 0
        self._owners: list[tuple[int, str, int, int]] = [(0, "", 0, 0)]
        """From this number of a node on: module, call, rows."""
        self._lines: list[tuple[int, str]] = []
        """Nodes below this number, and not below that before, are of this line."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, operators are the recorder's own. Hashes that are asked for are started when it
        ends, before the script writes to their tensors."""
        was, self._busy = self._busy, True
        try:
            with torch.no_grad():
                yield
                self._recorder.hashes.launch()
        finally:
            self._busy = was

    # modules

    def with_keywords(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """torch's global hooks are not given what a module is called with by name."""

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._keywords = kwargs
            return call(module, *args, **kwargs)

        return called

    def enter_module(self, module: nn.Module, positional: Any) -> None:
        if not self._recorder.detailed or self._busy:
            return
        args, self._keywords = (positional, self._keywords), {}
        if not self._stack:
            self._name(module)
        if not self._stack and torch._C._current_autograd_node() is None:
            self._call += 1
            first = next(iter(_tensors(args)), None)
            self._rows = 0 if first is None or not first.dim() else first.shape[0]
        name = self._modules.get(id(module), type(module).__name__)
        with self.aside():
            own = (*module.parameters(False), *module.buffers(False))
            before = [self._hashes(each) for each in (*_tensors(args), *own)]
        self._stack.append((name, before))
        self._own_from_here()

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._stack or self._busy:
            return
        before = self._stack[-1][1]
        if self._recorder.detailed:
            with self.aside():
                after = [self._hashes(each) for each in _tensors(output)]
            self._record(MODULE, before, after, [], "")
        self._stack.pop()
        self._own_from_here()

    def _name(self, root: nn.Module) -> None:
        for name, module in root.named_modules():
            self._modules[id(module)] = plain_name(name) or type(module).__name__

    def _own_from_here(self) -> None:
        module = self._stack[-1][0] if self._stack else ""
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._owners.append((number, module, self._call, self._rows))

    # operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._busy or not self._recorder.detailed:
            return func(*args, **kwargs)
        self._note_line()
        name = func._schema.name.partition("::")[2]
        read, written = _arguments(func, args, kwargs)
        with self.aside():
            before = [self._hashes(each) for each in read]
            # What is written as well as read counts as an input that another operator may fill.
            changed = [] if name in OVERWRITES else [self._hashes(each) for each in written]
        result = func(*args, **kwargs)
        _wait_for(func, result)
        with self.aside():
            undefined = name in UNDEFINED
            after = [] if undefined else [self._hashes(each) for each in _tensors(result)]
            after += [self._hashes(each) for each in written]
        self._record(str(func), before, after, changed, _numbers(args, kwargs), view=func.is_view)
        return result

    def _record(
        self,
        name: str,
        read: list[Any],
        results: list[Any],
        changed: list[Any],
        numbers: str,
        view: bool = False,
    ) -> None:
        direction, module, call = self._place()
        self._recorder.entry(
            {
                "at": [direction, module, name],
                "line": self._line(),
                "call": call,
                "numbers": numbers,
                "view": view,
                "in": [each for each in read if each],
                "changed": [each for each in changed if each],
                "out": [each for each in results if each],
            }
        )

    def _place(self) -> tuple[str, str, int]:
        """Direction, module, number of the model's call in this step (0: none)."""
        node: Any = torch._C._current_autograd_node()
        if self._stack:
            return "forward" if node is None else "recompute", self._stack[-1][0], self._call
        if node is not None:
            module, call = self._owner(node)
            return "backward", module, call
        if self.optimizer:
            return "optimizer", self.optimizer, 0
        return "forward", "", self._call

    def _line(self) -> str:
        """The line that calls the operator now; in the backward pass that of the forward pass."""
        node: Any = torch._C._current_autograd_node()
        if node is None or self._stack:
            return calling_line()
        number = node._sequence_nr()
        at = bisect_right(self._lines, number, key=lambda line: line[0])
        return self._lines[at][1] if at < len(self._lines) else ""

    def _note_line(self) -> None:
        """Of the nodes that autograd has made since the last operator: it makes that of an operator
        before it calls it."""
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if torch._C._current_autograd_node() is None and number > self._last_number:
            self._lines.append((number, calling_line()))

    @property
    def _last_number(self) -> int:
        return self._lines[-1][0] if self._lines else 0

    def _owner(self, node: Any) -> tuple[str, int]:
        number = node._sequence_nr()
        if number == _LAST_SEQUENCE_NR:
            parameter = getattr(node, "variable", None)
            return self._recorder.name_of(parameter, 0), self._call
        _, module, call, self._rows = self._owners[
            bisect_right(self._owners, number, key=lambda owner: owner[0]) - 1
        ]
        return module, call

    def _hashes(self, tensor: Tensor) -> list[Any] | None:
        """[shape, hash, hashes of the rows of the batch or none]; None: it has no bytes here."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
            return None
        hashes, rows = self._recorder.hashes, self._rows
        is_cut = rows and tensor.dim() and tensor.shape[0] and tensor.shape[0] % rows == 0
        by_row = hashes.rows(tensor, rows) if is_cut else ""
        return [list(tensor.shape), hashes.whole(tensor), by_row]


def _digest_of(made: Sequence[Any]) -> str:
    """Of bytes and of hashes that were fetched."""
    whole = xxhash.xxh3_128()
    for each in made:
        piece = each if isinstance(each, bytes) else str(each).encode()
        whole.update(len(piece).to_bytes(8, "big") + piece)
    return str(whole.hexdigest())


def _setting() -> dict[str, Any]:
    """The level of determinism that is enabled now."""
    active = enabled()
    if active is None:
        return {"level": "none"}
    leaf_rows = int(active.settings.get("leaf_rows", "1"))
    return {"level": active.level, "seed": active.seed, "leaf_rows": leaf_rows}


def header() -> dict[str, Any]:
    """Facts that two runs should have in common."""
    hash_seed = os.environ.get("PYTHONHASHSEED", "random")
    return {
        "format": FORMAT,
        "rank": int(os.environ.get("RANK", "0")),
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "facts": {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "CPU": torch.backends.cpu.get_cpu_capability(),
            "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "PYTHONHASHSEED": "random" if HASH_SEED_CHOSEN in os.environ else hash_seed,
        },
    }


def calling_line() -> str:
    """ "train.py:41": of the innermost call that is neither torch's nor mend's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if name := _shown(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_OWN = tuple(f"{os.path.dirname(file)}{os.sep}" for file in (torch.__file__, __file__))


@cache
def _shown(file: str) -> str:
    """A file's name for people, relative to where the script was started; empty: it is code of
    torch, of this room, or of none that has a file."""
    path = os.path.abspath(file)
    if file.startswith("<") or path.startswith(_OWN):
        return ""
    here = f"{os.getcwd()}{os.sep}"
    return path.removeprefix(here)


def _arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads, and those that it writes."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        (written if alias is not None and alias.is_write else read).extend(_tensors(value))
    return read, written


def _numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments of an operator that are numbers."""

    def text(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(text, value))}]"
        return repr(value) if isinstance(value, (bool, int, float, complex, str)) else "-"

    whole = text([*args, *kwargs.values()])
    return whole if len(whole) <= NUMBERS_MAX else xxhash.xxh3_128_hexdigest(whole.encode())


def _wait_for(func: Any, result: Any) -> None:
    """A collective's result is there when its work is done."""
    space, _, name = func._schema.name.partition("::")
    if space == "c10d" and name.startswith(WAITED):
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(each, torch.ScriptObject):
                torch.distributed.Work.unbox(each).wait()


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return _tensors(vars(value)) if is_dataclass(value) else []
