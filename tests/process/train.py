"""The training script of the process tests: a tiny model, data of its own, mend's public API only.

`python -m tests.process.train '{"out": "...", "steps": 8, ...}'`, see Options. Rack, racks and
addresses come from the environment, as in any job. The reference builds the same model and steps
from here, so both programs train on the same numbers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import os
import resource
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss

from tests.process import injected

INPUTS, WIDTH, OUTPUTS = 6, 10, 3


@dataclass(frozen=True)
class Options:
    out: str
    steps: int = 8
    config: dict[str, Any] = field(default_factory=dict)
    model: str = "plain"
    seed: int | None = None
    """Of the first weights; None: the number of the rack."""
    parallel: str = "ddp"
    """How the ranks of a rack share the model, see `spread`."""
    device: str = "cpu"
    """Or "cuda": the ranks of a rack have a GPU each; racks share them where they are few."""
    one_dataset: bool = False
    """Whether all racks train on the data of rack 0."""
    same_data: bool = False
    """All ranks of a rack have one batch: the mean of equal gradients is that of one rank, to the
    bit, so racks of 1, 2 and 4 ranks train alike."""
    keep_local: bool = False
    forget: bool = False
    """Neither session nor shutdown: the program just ends."""
    learning_rate: float = 0.05
    optimizer: str = "SGD"
    """See OPTIMIZERS."""
    tell_moments: bool = False
    """Behind every step: what the optimizer keeps, the gradients it was given, and buffers."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """step -> folder of the checkpoint that is made behind it."""
    resume: str = ""
    """A checkpoint, or a folder of them, to go on from; steps are then those of the whole job."""
    cut_every: int = 0
    """A checkpoint behind every step that this divides, in a folder `cuts` by its number."""
    cuts: str = ""
    background: bool = False
    """Whether checkpoints are written while it trains on."""
    dcp: bool = False
    """Whether they are those of torch.distributed.checkpoint, with mend's state in them."""
    reshard: bool = False
    """Whether what a script saves can be loaded by another number of ranks that hold shards."""
    save_gate: str = ""
    """What a script saves behind `gated_step` waits for this file."""
    gated_step: int = 0
    failing_step: int = 0
    """What a script saves behind it does not fit the disk."""
    pace_ms: float = 0.0
    """How long a step takes at least: the speed of this rack."""
    products: int = 0
    """Matrix products that each micro-batch computes besides, about a millisecond each."""
    micro_batches: int = 0
    """Of a step; the script asks how many to take. 0: it does not ask."""
    at: dict[str, list[list[Any]]] = field(default_factory=dict)
    """step -> acts just before it, see `Acts`. "end": between the last step and the shutdown;
    "leaving": behind the status from before it."""
    stop: str = ""
    """All ranks of the rack make no further step once the test has made this file."""
    halt: str = ""
    """No step begins while this file is there."""


class Tied(nn.Module):
    """One weight in two places, a frozen one, and one that is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(INPUTS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.leave = nn.Linear(WIDTH, OUTPUTS)
        self.leave.weight = nn.Parameter(self.leave.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(torch.tanh(self.enter(x))))
        out: Tensor = self.leave(torch.tanh(self.frozen(self.second(x))))
        return out


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS, bias=False))


def half() -> nn.Module:
    return plain().to(torch.bfloat16)


class Masked(nn.Linear):
    """Multiplies its weights with a constant, which is not of the state dict."""

    def __init__(self) -> None:
        super().__init__(INPUTS, WIDTH)
        self.register_buffer("mask", torch.rand(WIDTH, INPUTS) < 0.5, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.get_buffer("mask"), self.bias)


def masked() -> nn.Module:
    return nn.Sequential(Masked(), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))


def even() -> nn.Module:
    """Widths that tensor parallelism can halve."""
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, OUTPUTS))


def broad() -> nn.Module:
    """Long enough that headers are nothing beside payloads."""
    return nn.Sequential(nn.Linear(INPUTS, 60_000), nn.Tanh(), nn.Linear(60_000, OUTPUTS))


def normed() -> nn.Module:
    """With the running statistics of a BatchNorm in it."""
    layers = nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS)
    return nn.Sequential(*layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain, "unbiased": wider, "bfloat16": half, "tied": Tied, "even": even, "broad": broad,
    "masked": masked, "normed": normed,
}  # fmt: skip


def build(model: str, seed: int) -> nn.Module:
    """`seed` is the number of the rack: each starts elsewhere, and trains on rack 0's version 0.

    What is frozen never travels, so it is the same from the start.
    """
    torch.manual_seed(seed)
    made = MODELS[model]()
    fixed = torch.Generator().manual_seed(77)
    for parameter in made.parameters():
        if not parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=fixed))
    return made


class Lion(torch.optim.Optimizer):
    """As 2302.06675 has it; its second beta is that of the average."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                average = state.setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(average.lerp(p.grad, 1 - beta1).sign_(), alpha=group["lr"])
                average.lerp_(p.grad, 1 - beta2)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, momentum=0.9), "AdamW": torch.optim.AdamW, "Lion": Lion,
    "Adagrad": torch.optim.Adagrad, "AdamW, fused": partial(torch.optim.AdamW, fused=True),
}  # fmt: skip


def optimizer_of(
    model: nn.Module, learning_rate: float = 0.05, kind: str = "SGD"
) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return OPTIMIZERS[kind](trained, lr=learning_rate)


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Of all ranks together, as `state:parameter`; gradients as `grad:parameter`, and this rank's
    buffers as `buffer:name`."""
    found = {f"buffer:{name}": buffer.tolist() for name, buffer in model.named_buffers()}
    for name, p in model.named_parameters():
        for state, value in {**optimizer.state.get(p, {}), "grad": p.grad}.items():
            if isinstance(value, Tensor) and value.shape == p.shape:
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{state}:{name}"] = whole.detach().float().reshape(-1).tolist()
    return found


def tokens_of(rack: int, step: int) -> int:
    """Racks weigh differently, and differently in every round."""
    return 4 + 3 * rack + step % 3


def loss_of(model: nn.Module, rack: int, rank: int, step: int) -> Tensor:
    """On a batch that depends on these numbers alone."""
    tokens = tokens_of(rack, step)
    rng = torch.Generator().manual_seed(1_000_003 * rack + 10_007 * rank + step)
    teacher = torch.randn(INPUTS, OUTPUTS, generator=torch.Generator().manual_seed(500 + rack))
    x = torch.randn(tokens, INPUTS, generator=rng)
    like = next(model.parameters())
    target = (x @ teacher).to(like.device, like.dtype)
    return mse_loss(model(x.to(like.device, like.dtype)), target)


def fresh(model: str = "plain") -> tuple[nn.Module, torch.optim.Optimizer]:
    """As rack 0 begins with it, and what trains it."""
    made = build(model, 0)
    return made, optimizer_of(made)


def backward(model: nn.Module, step: int) -> None:
    """Of the step of rank 0 of rack 0, on new gradients."""
    model.zero_grad()
    loss_of(model, 0, 0, step).backward()


def make_steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last + 1):
        backward(model, step)
        optimizer.step()


def multiply(products: int) -> None:
    """Arithmetic that no bit of training depends on."""
    if products:
        a = torch.full((256, 256), 0.5)
        out = torch.empty_like(a)
        for _ in range(products):
            torch.mm(a, a, out=out)


def spread(model: nn.Module, parallel: str, device: str = "cpu") -> nn.Module:
    """Over the ranks of this rack. fsdp2: shards over all; fsdp2-keep: gathered between forward and
    backward; hsdp: shards over pairs that are replicas of each other; tp: halves of the layers over
    pairs, shards of these over the others."""
    ranks = torch.distributed.get_world_size()
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if parallel in ("fsdp2", "fsdp2-keep"):
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))
    elif parallel == "hsdp":
        mesh = init_device_mesh(device, (2, ranks // 2), mesh_dim_names=("replicate", "dp"))
    else:
        assert parallel == "tp", parallel
        both = init_device_mesh(device, (2, ranks // 2), mesh_dim_names=("dp", "tp"))
        layers = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, both["tp"], layers)
        mesh = both["dp"]
    # Left to itself, torch reshards a layer after its forward pass, and not the root.
    more = {"reshard_after_forward": False} if parallel == "fsdp2-keep" else {}
    if parallel != "tp":
        fully_shard(model.get_submodule("0"), mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def bits(tensor: Tensor) -> list[int]:
    """Every element as an integer: the only equality that counts."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    kind = {4: torch.int32, 2: torch.int16}[flat.element_size()]
    return flat.view(kind).tolist()


def of_model(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Its parameters and running statistics, by name."""
    statistics = ((name, b) for name, b in model.named_buffers() if b.is_floating_point())
    return [*model.named_parameters(), *statistics]


def weights(model: nn.Module) -> dict[str, list[int]]:
    """Of all ranks together. Collective where the model is sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: bits(p) for name, p in of_model(model)}


PENDING: list[Any] = []
"""What torch still writes."""


class Acts:
    """What a scenario may do to a rack, named in Options.at."""

    def __init__(
        self, model: nn.Module, wrapped: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.model, self.wrapped, self.optimizer = model, wrapped, optimizer
        self.runtime: Any = None
        self.merged_losses: list[str] = []
        self.answers: list[bool] = []
        self.own_loss = ""
        self.slower = 1.0
        self.loader: tuple[float, Path] = 0.0, Path()
        self._healthy: tuple[list[Tensor], dict[str, Any]] | None = None

    def do(self, acts: list[list[Any]]) -> None:
        for name, *arguments in acts:
            getattr(self, name)(*arguments)

    def touch(self, path: str) -> None:
        """Tell the test."""
        Path(path).touch()

    def pulled(self, path: str) -> None:
        """Tell the test what came in over data connections so far, headers too."""
        Path(path).write_text(str(self.runtime._rank.io_loop._lane.bytes_received))

    def metrics(self, path: str) -> None:
        """Tell the test."""
        Path(path).write_text(json.dumps(self.runtime.metrics()))

    def hold_loop(self, path: str) -> None:
        """The loop's thread waits until the test makes the file."""
        self.runtime._rank.io_loop.call(lambda: self.gate(path))

    def gate(self, path: str) -> None:
        """Wait for the test, which makes the file."""
        injected.await_file(path)

    def hear(self, fragment: int) -> None:
        """Wait until this rank knows that a round of the fragment is open."""
        while fragment not in self.runtime._rank.published.orders.opened:
            time.sleep(0.005)

    def holds(self, fragment: int, version: int, path: str) -> None:
        """Wait until this rank has the bytes of a decided version, and tell the test."""
        while (fragment, version) not in self.runtime._rank.rank.store.anchors:
            time.sleep(0.005)
        self.touch(path)

    def hold_back(self, fragment: int, path: str) -> None:
        """Pulls of this fragment wait until the test makes the file."""
        injected.hold_pulls(self.runtime, injected.of_fragment(fragment), Path(path))

    def hold_offers(self, rack: int, path: str) -> None:
        """Pulls of this rack's offers wait until the test makes the file."""
        injected.hold_pulls(self.runtime, injected.of_rack(rack), Path(path))

    def grow_slowly(self, path: str) -> None:
        """This rank announces no offer, although all its bytes are served, before the test makes
        the file."""
        injected.grow_slowly(self.runtime, Path(path))

    def tell_early(self, rack: int, path: str) -> None:
        """Tell the test once all bytes of an offer of this rack came before it was announced."""
        injected.tell_early(rack, Path(path))

    def withhold(self) -> None:
        """Nobody gets a copy of this rank's weights any more, as over a link too slow."""
        rank = self.runtime._rank.rank
        for (fragment, _), anchor in list(rank.store.anchors.items()):
            rank.host.drop(rank.store.anchor_key(fragment, anchor))

    def slow(self, times: float) -> None:
        """From here on a step takes so many times as long."""
        self.slower = times

    def find(self, times: float, cause: str, begins: str, ends: str, links: bool = False) -> None:
        """This rank finds that its steps take so many times as long while the first of the files is
        there and the second is not; and that this is why. Whatever they take. `links`: whether
        pulls are judged as ever."""
        shown = injected.slow_between(Path(begins), Path(ends), times)
        injected.show_pace(self.runtime, shown, cause, links=links)

    def age_silence(self, rack: int, seconds: int) -> None:
        """A rack that is silent has been so for at least so long, as far as this one knows."""
        injected.age_silence(rack, seconds)

    def wait_at_the_end(self, path: str) -> None:
        """Its shutdown waits for the other racks until the test makes the file."""
        injected.wait_at_the_end(self.runtime, Path(path))

    def mute(self, path: str) -> None:
        """Nobody gets a byte of a payload from this rank before the test makes the file."""
        injected.mute_lane(Path(path))

    def load_slowly(self, step_ms: float, path: str) -> None:
        """Once the test has made the file its loader takes longer, for 60 steps of 120: on a busy
        machine the first verdict may name another cause."""
        self.loader = step_ms, Path(path)

    def load(self, step: int) -> None:
        """As a loader of data does."""
        step_ms, path = self.loader
        if step_ms and step % 120 < 60 and path.exists():
            time.sleep(step_ms / 1000)

    def pin(self, core: int) -> None:
        """The training thread, and those that it starts from here on, share this core with whoever
        is on it."""
        os.sched_setaffinity(0, {core})

    def poison(self) -> None:
        """The next step makes NaN of everything."""
        values = [p.detach().clone() for p in self.model.parameters()]
        self._healthy = values, copy.deepcopy(self.optimizer.state_dict())
        next(self.model.parameters()).data.fill_(float("nan"))

    def spoil_statistics(self) -> None:
        """A forward pass meets an infinity, in a step that is skipped."""
        self.model(torch.full((4, INPUTS), float("inf")))

    def jump(self, far: float) -> None:
        """Weights become this number: finite, and absurd."""
        next(self.model.parameters()).data.fill_(far)

    def spoil(self, value: float) -> None:
        """From here on the bytes of offers are this number, behind mend's own check of them."""
        from mend_lab.sim.numbers import Spoiler

        numerics = self.runtime._rank.numerics
        numerics.__class__, numerics._spoils = Spoiler, lambda: value

    def break_rule(self, thread: str) -> None:
        """What mend keeps contradicts itself from here on, and this thread is to find it."""
        from mend.errors import ensure

        rank = self.runtime._rank
        if thread == "loop":  # the offers of the next commit have ended
            log = rank.rank.rank_machine.folded
            ended = {(member, 0): 1 << 40 for member in log.members}
            rank.io_loop.call(partial(log.ended.update, ended))
        elif thread == "worker":  # nothing says how the next offer is encoded
            for anchor in rank.rank.store.anchors.values():
                object.__setattr__(anchor, "codecs", None)
        else:
            rank.trainer._capture = lambda fragment: ensure(False, "planted", fragment=fragment)

    def die_owning(self) -> None:
        """kill -9 of itself in the middle of the next sharded round: one of its merged slices is
        served, and the next one would be merged now."""
        from mend.coordination.events import MergeSlice

        rank = self.runtime._rank.rank
        handlers = rank._queue._handlers[id(rank.rank_machine)]
        merge = handlers[MergeSlice]

        def dies(effect: MergeSlice) -> None:
            if rank.store.attempts[effect.key].own:
                os.kill(os.getpid(), signal.SIGKILL)
            merge(effect)

        handlers[MergeSlice] = dies

    def repair(self) -> None:
        """Weights and momentum are again what they were before."""
        assert self._healthy is not None
        values, state = self._healthy
        for parameter, value in zip(self.model.parameters(), values, strict=True):
            parameter.data.copy_(value)
        self.optimizer.load_state_dict(state)

    def evaluate(self) -> None:
        """As between two ballots: FSDP2 leaves the root's parameters gathered behind it."""
        with torch.no_grad():
            loss_of(self.wrapped, 0, 0, 0)

    def merged_loss(self) -> None:
        """Of the anchor, right behind an evaluation: as it is seen, and as it is once FSDP2 has
        dropped what it had gathered."""
        self.evaluate()
        with self.runtime.anchor_weights(), torch.no_grad():
            seen = loss_of(self.wrapped, 0, 0, 0)
            for module in self.wrapped.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            self.merged_losses = [float(seen).hex(), float(loss_of(self.wrapped, 0, 0, 0)).hex()]
        self.own_loss = float(loss_of(self.wrapped, 0, 0, 0).detach()).hex()

    def merged(self, path: str) -> None:
        """Tell the test the versions that this rack has applied, and their bits."""
        with self.runtime.anchor_weights():
            told = {"versions": self.runtime.status().versions, "weights": weights(self.model)}
        part = Path(f"{path}.{os.getpid()}")  # every rank of the rack writes the same
        part.write_text(json.dumps(told))
        part.rename(path)

    def disk(self, free_bytes: int) -> None:
        """No file may grow beyond this; Python ignores the signal, so a write fails as on a full
        disk. -1: there is room again."""
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if free_bytes < 0 else free_bytes, hard))

    def unread(self, fifo: str) -> None:
        """stderr becomes a pipe that is full and that nobody reads, and every line of the log goes
        there."""
        descriptor = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(descriptor, b"." * size)
        os.set_blocking(descriptor, True)
        os.dup2(descriptor, 2)
        logger = logging.getLogger("mend")
        logger.addHandler(logging.StreamHandler(open(2, "w", closefd=False)))  # noqa: SIM115
        logger.setLevel(logging.DEBUG)

    def record(self, count: int) -> None:
        """As many events, and lines of the log."""
        for number in range(count):
            self.runtime.record(number=number)

    def ask(self, rank: int) -> None:
        """Whether any rank of the rack says so; this one does."""
        self.answers.append(self.runtime.any_rank(rank == int(os.environ["RANK"])))

    def fail(self) -> None:
        raise RuntimeError("the loss exploded")

    def exit(self) -> None:
        """As a script that thinks it is done."""
        sys.exit(0)

    def die(self, name: str, rank: int = 0) -> None:
        """By a signal, of one rank of the rack."""
        if rank == int(os.environ.get("RANK", "0")):
            os.kill(os.getpid(), signal.Signals[name])


def run(options: Options, result: dict[str, Any]) -> None:
    import mend
    import mend.errors

    expect_warnings()
    injected.prepare()
    rack, rank = int(os.environ["MEND_RACK"]), int(os.environ.get("RANK", "0"))
    model = build(options.model, rack if options.seed is None else options.seed)
    ranks, gpu = int(os.environ.get("WORLD_SIZE", "1")), options.device == "cuda"
    if gpu:
        torch.cuda.set_device((rack * ranks + rank) % torch.cuda.device_count())
        model.cuda()
    wrapped: nn.Module = model
    if ranks > 1:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
        wrapped = spread(model, options.parallel, options.device)
    optimizer = optimizer_of(model, options.learning_rate, options.optimizer)
    acts = Acts(model, wrapped, optimizer)
    resume = resumed(options, rack, wrapped, optimizer)
    losses: list[str] = result.setdefault("losses", [])
    result["moments"] = []
    config = mend.MendConfig(**options.config)
    try:
        with (
            contextlib.nullcontext(mend.mend_init(wrapped, config, optimizer, **resume))
            if options.forget
            else mend.session(wrapped, config, optimizer, keep_local=options.keep_local, **resume)
        ) as runtime:
            acts.runtime = runtime
            result["begun"] = seen(runtime.status())
            result["buffers"] = {name: each.tolist() for name, each in model.named_buffers()}
            for step in steps_of(options, runtime):
                acts.do(options.at.get(str(step), []))
                acts.load(step)
                all_ = options.micro_batches
                taken = runtime.local_batch(all_) if all_ else 1
                result.setdefault("taken", []).append(taken)
                loss = loss_of(
                    wrapped,
                    0 if options.one_dataset else rack,
                    0 if options.same_data else rank,
                    step,
                )
                multiply(options.products * taken)
                optimizer.zero_grad()
                loss.backward()
                runtime.count_tokens(tokens_of(rack, step) * taken)
                optimizer.step()
                losses.append(struct.pack(">f", float(loss.detach())).hex())
                result["moments"].append(moments(model, optimizer) if options.tell_moments else {})
                if folder := folder_of(options, step):
                    try:
                        checkpoint(runtime, options, folder, step, model, optimizer)
                    except mend.errors.CheckpointError as error:
                        result.setdefault("not_saved", []).append(str(error))
                time.sleep(acts.slower * options.pace_ms * taken / (all_ or 1) / 1000)
            await_torch()
            acts.do(options.at.get("end", []))
            result["merged_losses"], result["own_loss"] = acts.merged_losses, acts.own_loss
            result["answers"] = acts.answers
            result["before_shutdown"] = seen(runtime.status())
            acts.do(options.at.get("leaving", []))
    finally:
        result["weights"] = weights(model)
        if "runtime" in locals():
            result["status"] = seen(runtime.status())
        result["threads"] = mend_threads()
    leave_group()


def steps_of(options: Options, runtime: Any) -> Iterator[int]:
    """Those that are still to be made."""
    for step in range(runtime.status().step + 1, options.steps + 1):
        while options.halt and Path(options.halt).exists():
            time.sleep(0.005)
        if options.stop and runtime.any_rank(Path(options.stop).exists()):
            return
        yield step


def resumed(
    options: Options, rack: int, wrapped: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """What mend_init goes on from, once the model and the optimizer are loaded."""
    import mend

    if not options.resume:
        return {}
    if options.dcp:
        return {"resume": load_dcp(f"{options.resume}/rack-{rack}", wrapped, optimizer)}
    found = mend.newest_checkpoint(options.resume) or options.resume
    path = Path(found) / f"rack-{rack}"
    (load_resharded if options.reshard else load)(path, bare(wrapped), optimizer)
    return {"resume": found}


def folder_of(options: Options, step: int) -> str:
    """Of the checkpoint behind this step, if there is to be one."""
    if options.cut_every and step % options.cut_every == 0:
        return f"{options.cuts}/step-{step}"
    return options.checkpoints.get(str(step), "")


def checkpoint(
    runtime: Any,
    options: Options,
    folder: str,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    gate = options.save_gate if step == options.gated_step else ""
    write = partial(save, model, optimizer, gate, step == options.failing_step)
    if options.dcp:
        save_dcp(runtime, f"{folder}/rack-{runtime.status().rack}", model, optimizer)
    elif options.reshard:
        runtime.checkpoint(folder, partial(save_resharded, model, optimizer))
    elif options.background:
        runtime.async_checkpoint(folder, partial(save_later, write))
    else:
        runtime.checkpoint(folder, write)


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gate: str,
    full: bool,
    folder: Path,
    state: dict[str, Any] | None = None,
) -> None:
    """What a script keeps of its own, one file per rank. `state`: a copy of it; None: as it is
    now."""
    if full:
        raise OSError(28, "No space left on device", "script.pt")
    if gate:
        injected.await_file(gate)
    rank = os.environ.get("RANK", "0")
    state = state or state_of(model, optimizer)
    torch.save(state, folder / f"script-{rank}.pt")


def save_later(write: Any, folder: Path) -> Callable[[], None]:
    """As `write`, a partial `save`, does it, once it is called."""
    model, optimizer = write.args[:2]
    return partial(write, folder, copy.deepcopy(state_of(model, optimizer)))


def save_dcp(runtime: Any, path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """In the background; the process waits for it at its end."""
    beside = torch.distributed.new_group(backend="gloo")
    state: dict[str, Any] = {
        "mend": runtime.checkpoint_state()
    }  # first: it may apply what is decided
    state["model"], state["optim"] = get_state_dict(model, optimizer)
    PENDING.append(dcp.async_save(state, checkpoint_id=path, process_group=beside))


def save_resharded(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder / "script")


def load_resharded(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder / "script")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def mend_threads() -> list[str]:
    """That still run. Nobody waits for a look-up, which a rack that ends early may overtake."""
    for thread in threading.enumerate():
        if thread.name == "mend-lookup":
            thread.join(5)
    return sorted(each.name for each in threading.enumerate() if "mend" in each.name)


def await_torch() -> None:
    for pending in PENDING:
        pending.result()


def load_dcp(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    import mend

    saved = mend.SavedState(path)
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"mend": saved, "model": weights, "optim": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return saved


def bare(model: nn.Module) -> nn.Module:
    """Without DDP, as another number of ranks may load it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": bare(model).state_dict(), "optimizer": optimizer.state_dict()}


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not folder.exists():
        return  # this rack begins with a copy
    rank = os.environ.get("RANK", "0")
    path = folder / f"script-{rank}.pt"
    if not path.exists() and not sharded(model):
        path = folder / "script-0.pt"  # of fewer ranks
    state = torch.load(path, weights_only=not sharded(model))
    bare(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def sharded(model: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def seen(status: Any) -> dict[str, Any]:
    return dataclasses.asdict(status)


@contextlib.contextmanager
def told(path: str) -> Iterator[dict[str, Any]]:
    """What is put in is the result of this rank, whole, however the script ends. `path`: with
    `{rank}` in it."""
    result: dict[str, Any] = {}
    try:
        yield result
    except BaseException as error:
        result["error"] = [type(error).__name__, str(error)]
        raise
    finally:
        out = Path(path.format(rank=os.environ.get("RANK", "0")))
        out.with_suffix(".part").write_text(json.dumps(result))
        out.with_suffix(".part").rename(out)


def expect_warnings() -> None:
    # Of torch, about the output of its own RowwiseParallel; nothing here works in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # A rack of one rank saves and loads as it does.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")
    # True of topk and powersgd, which are tried here all the same; the log has it.
    warnings.filterwarnings("default", message=".* raised the loss by .* from random weights")


def run_script(kind: Callable[..., Any], run: Callable[[Any, dict[str, Any]], None]) -> None:
    """The main program of a script: the command line has the options of this `kind`, as JSON, and
    `run` puts the result of this rank into a dict."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    options = kind(**json.loads(sys.argv[1]))
    with told(options.out) as result:
        run(options, result)


def leave_group() -> None:
    """Of the ranks of this rack, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # see examples/fsdp2.py
        torch.distributed.destroy_process_group()


def main() -> None:
    run_script(Options, run)


if __name__ == "__main__":
    main()
