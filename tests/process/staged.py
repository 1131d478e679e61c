"""A training script whose ranks hold different modules: stages of a pipeline, experts, or both with
FSDP2.

`python -m tests.process.staged '{"out": "...", ...}'`, see Options; results are those of train.py.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import mse_loss

from tests.process import injected, train
from tests.process.train import INPUTS, OUTPUTS, WIDTH, seen, tokens_of, weights

EXPERTS, MICRO_BATCHES, ROWS = 4, 4, 16
PARTS = "model", "optim"
DRAIN_S = 60.0
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""By the names of parameters: lists of groups would be those of the first stage."""


@dataclass(frozen=True)
class Options:
    out: str
    steps: int = 8
    config: dict[str, Any] = field(default_factory=dict)
    layout: str = "stages"
    """one, one-experts: a rank has it all. stages: a stage each. interleaved: two stages each, as a
    ModuleList. stages-fsdp2: two stages, each over half of the ranks. stages-experts: the same,
    with experts whose matrices lie over the ranks of the stage. experts: they lie over pairs, and
    all else over all ranks. fsdp2: the rows of all over all ranks. local: as stages, which count
    from 0. alike: replicas that nobody keeps equal."""
    blocks: int = 4
    schedule: str = "gpipe"
    synthetic: bool = False
    """Gradients are fixed functions of name, rack and step, and no stage runs."""
    normed: bool = False
    """A BatchNorm in each block."""
    optimizer: str = "SGD"
    checkpoints: dict[str, str] = field(default_factory=dict)
    resume: str = ""
    dcp: bool = False
    """Checkpoints are those of torch.distributed.checkpoint."""
    pace_ms: float = 0.0
    dies_at: int = 0
    """Step before which the rack kills itself."""
    stop: str = ""
    """All ranks of the rack make no further step once the test has made this file."""
    merged: str = ""
    """Before the shutdown each rank tells here what it has merged, and waits for this file."""
    table: str = ""
    """A module that gets a buffer of the rack's own."""
    leave_out: str = ""
    """A parameter that no rank of this rack trains."""


class Block(nn.Module):
    """Its LayerNorm is the same in all blocks at first."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.statistics = nn.BatchNorm1d(WIDTH) if normed else None
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.statistics is not None:
            x = self.statistics(x)
        out: Tensor = x + torch.tanh(self.linear(x))
        return out


class Experts(nn.Module):
    """Each row goes to one of EXPERTS matrices, on the rank that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x_NW: Tensor) -> Tensor:
        score_N, expert_N = self.gate(x_NW).softmax(-1).max(-1)
        order_N = expert_N.argsort(stable=True)
        sent_E = expert_N.bincount(minlength=EXPERTS)
        held, spread = self.up, isinstance(self.up, DTensor)
        group = held.device_mesh.get_group() if spread else None
        sorted_NW, come_E = x_NW[order_N], sent_E
        if spread:
            ranks = group.size()
            held, come_E = held.to_local(), torch.empty_like(sent_E)
            dist.all_to_all_single(come_E, sent_E, group=group)
            splits = [each.view(ranks, -1).sum(1).tolist() for each in (come_E, sent_E)]
            sorted_NW = all_to_all_single_autograd(sorted_NW, *splits, group)
        local = torch.arange(len(held)).repeat(len(come_E) // len(held))
        made = [
            part @ held[expert]
            for part, expert in zip(sorted_NW.split(come_E.tolist()), local, strict=True)
        ]
        out_NW = torch.cat(made)
        if spread:
            out_NW = all_to_all_single_autograd(out_NW, *splits[::-1], group)
        return x_NW + out_NW[order_N.argsort()] * score_N[:, None]


class Model(nn.Module):
    """Or a stage of it: what it lacks does nothing."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        make = Experts if "experts" in options.layout else partial(Block, options.normed)
        self.enter: nn.Module | None = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleDict({str(i): make() for i in range(options.blocks)})
        self.leave: nn.Module | None = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.enter, *self.blocks.values(), self.leave):
            x = layer(x) if layer is not None else x
        return x


def stage_of(options: Options, seed: int, stage: int, stages: int) -> Model:
    """With the first weights that the whole model has."""
    torch.manual_seed(seed)
    model, each = Model(options), options.blocks // stages
    kept = range(stage * each, (stage + 1) * each)
    blocks = {str(i): model.blocks[str(i)] for i in kept}
    if options.layout == "local":
        blocks = dict(zip("0123", blocks.values(), strict=False))
    model.blocks = nn.ModuleDict(blocks)
    model.enter = model.enter if stage == 0 else None
    model.leave = model.leave if stage == stages - 1 else None
    return model


def data(rack: int, step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * rack + step)
    x = torch.randn(ROWS, INPUTS, generator=rng)
    return x, x[:, :OUTPUTS].square()


class Trained:
    """What a rank trains, and how it makes gradients. `model`: what mend gets."""

    model: nn.Module

    def __init__(self, options: Options, seed: int) -> None:
        self.model = stage_of(options, seed, 0, 1)

    def backward(self, rack: int, step: int) -> None:
        """As the pipelines: micro-batch by micro-batch."""
        pairs = zip(*(each.chunk(MICRO_BATCHES) for each in data(rack, step)), strict=True)
        for x, y in pairs:
            mse_loss(self.model(x), y).backward()
        for p in self.model.parameters():
            p.grad = p.grad / MICRO_BATCHES if p.grad is not None else None


class Alike(Trained):
    """The same model on every rank, each with gradients of its own."""

    def backward(self, rack: int, step: int) -> None:
        super().backward(100 * rack + dist.get_rank(), step)


class Sharded(Trained):
    def __init__(self, options: Options, seed: int) -> None:
        super().__init__(options, seed)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


class Staged(Trained):
    def __init__(self, options: Options, seed: int) -> None:
        ranks, rank, each = dist.get_world_size(), dist.get_rank(), 1
        group: Any = None
        self.spread, self.row, self.rows = list[nn.Parameter](), 0, 1
        if cut := options.layout in ("stages-fsdp2", "stages-experts"):
            mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "dp"))
            ranks, rank, group = 2, mesh.get_local_rank("pp"), mesh.get_group("pp")
        elif options.layout == "interleaved":
            each = 2
        numbers = [rank + i * ranks for i in range(each)]
        models = [stage_of(options, seed, n, ranks * each) for n in numbers]
        self.model = models[0] if each == 1 else nn.ModuleList(models)
        if options.layout == "stages-experts":
            blocks = models[0].blocks.values()
            self.spread = [spread_experts(block, mesh["dp"]) for block in blocks]
            self.row, self.rows = mesh.get_local_rank("dp"), mesh["dp"].size()
        if cut:
            fully_shard(models[0], mesh=mesh["dp"], ignored_params=set(self.spread))
        self.first, self.last = numbers[0] == 0, numbers[-1] == ranks * each - 1
        stages = [
            PipelineStage(
                model, n, ranks * each, torch.device("cpu"), group=group, **self.shapes(n, ranks)
            )
            for n, model in zip(numbers, models, strict=True)
        ]
        kinds: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
        of = (MICRO_BATCHES, mse_loss)
        self.schedule: Any = (
            ScheduleInterleaved1F1B(stages, *of) if each > 1
            else kinds[options.schedule](stages[0], *of)
        )  # fmt: skip

    def shapes(self, stage: int, stages: int) -> dict[str, Any]:
        """Of a micro-batch: torch would find them by a pass over uninitialized tensors, and these
        choose the experts."""
        if not self.spread:
            return {}
        rows = ROWS // MICRO_BATCHES // self.rows
        inputs = INPUTS if stage == 0 else WIDTH
        outputs = OUTPUTS if stage == stages - 1 else WIDTH
        empty = partial(torch.empty, device="meta", requires_grad=True)
        return {"input_args": empty(rows, inputs), "output_args": empty(rows, outputs)}

    def backward(self, rack: int, step: int) -> None:
        x, y = (each.chunk(self.rows)[self.row] for each in data(rack, step))
        self.schedule.step(*[x] * self.first, **{"target": y} if self.last else {})
        for p in self.spread:
            assert isinstance(p.grad, DTensor)
            p.grad.to_local().div_(self.rows)


class Mixed(Trained):
    """Experts over pairs of ranks, everything else in shards over all."""

    def __init__(self, options: Options, seed: int) -> None:
        super().__init__(options, seed)
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("copies", "experts"))
        self.copies = mesh["copies"].get_group()
        self.spread = [
            spread_experts(block, mesh["experts"]) for block in self.model.blocks.values()
        ]
        whole = init_device_mesh("cpu", (ranks,))
        fully_shard(self.model, mesh=whole, ignored_params=set(self.spread))

    def backward(self, rack: int, step: int) -> None:
        x, y = data(rack, step)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        mse_loss(self.model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]).backward()
        for p in self.spread:
            assert isinstance(p.grad, DTensor)
            dist.all_reduce(p.grad.to_local(), group=self.copies)
            p.grad.to_local().div_(ranks)


def spread_experts(block: Any, mesh: DeviceMesh) -> nn.Parameter:
    block.up = nn.Parameter(distribute_tensor(block.up.detach(), mesh, [Shard(0)]))
    found: nn.Parameter = block.up
    return found


KINDS: dict[str, Callable[[Options, int], Trained]] = {
    "one": Trained, "one-experts": Trained, "stages": Staged, "interleaved": Staged,
    "fsdp2": Sharded, "stages-fsdp2": Staged, "stages-experts": Staged, "experts": Mixed,
    "local": Staged, "alike": Alike,
}  # fmt: skip


def bare(name: str) -> str:
    """Without the number of the stage in a ModuleList."""
    return name.split(".", 1)[1] if name[0].isdigit() else name


def set_gradients(model: nn.Module, rack: int, step: int) -> None:
    for name, p in model.named_parameters():
        seed = zlib.crc32(f"{bare(name)} {rack} {step}".encode())
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / f"script-{os.environ.get('RANK', 0)}.pt")


def checkpoint(
    options: Options, runtime: Any, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> None:
    if not options.dcp:
        runtime.checkpoint(folder, partial(save, model, optimizer))
        return
    state = {"mend": runtime.checkpoint_state()}  # first: it may apply what is decided
    held = get_state_dict(model, optimizer, options=FLAT)
    dcp.save(
        {**state, **dict(zip(PARTS, held, strict=True))},
        checkpoint_id=folder / f"rack-{os.environ['MEND_RACK']}",
    )


def load(
    options: Options, rack: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    if not options.resume:
        return {}
    folder = Path(options.resume) / f"rack-{rack}"
    if options.dcp:
        import mend

        saved = mend.SavedState(folder)
        held = get_state_dict(model, optimizer, options=FLAT)
        dcp.load({"mend": saved, **dict(zip(PARTS, held, strict=True))}, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=held[0], optim_state_dict=held[1], options=FLAT
        )
        return {"resume": saved}
    path = folder / f"script-{os.environ.get('RANK', 0)}.pt"
    state = torch.load(path, weights_only=False)
    if state["model"].keys() != model.state_dict().keys():
        return {"resume": options.resume}  # of another layout
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return {"resume": options.resume}


def steps_of(options: Options, runtime: Any) -> Iterator[int]:
    for step in range(runtime.status().step + 1, options.steps + 1):
        if step == options.dies_at:
            os.kill(os.getpid(), 9)
        if options.stop and runtime.any_rank(Path(options.stop).exists()):
            return
        yield step
        time.sleep(options.pace_ms / 1000)


def tell_merged(options: Options, model: nn.Module, runtime: Any) -> None:
    if not runtime.config.lockstep:  # offers of another rack may be merged after this one stopped
        runtime.drain(DRAIN_S)
        rack, rank = os.environ["MEND_RACK"], os.environ.get("RANK", "0")
        Path(f"{options.merged}.drained.{rack}.{rank}").touch()
        for other in range(int(os.environ["MEND_RACKS"])):
            injected.await_file(f"{options.merged}.drained.{other}.0")
        runtime.drain(DRAIN_S)
    with runtime.anchor_weights():
        held = {bare(name): each for name, each in weights(model).items()}
    told = {"versions": runtime.status().versions, "weights": held}
    path = Path(f"{options.merged}.{os.environ['MEND_RACK']}.{os.environ.get('RANK', '0')}")
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(told))
    part.rename(path)
    injected.await_file(options.merged)


def run(options: Options, result: dict[str, Any]) -> None:
    import mend

    train.expect_warnings()
    injected.prepare()
    rack = int(os.environ["MEND_RACK"])
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    trained = KINDS[options.layout](options, rack)
    model = trained.model
    for name, module in model.named_modules():
        if name and name == options.table:
            module.register_buffer("table", torch.full((2,), rack))
    for name, p in model.named_parameters():
        p.requires_grad_(name != options.leave_out)
    kinds: dict[str, Any] = {"SGD": partial(torch.optim.SGD, momentum=0.9)}
    make = kinds.get(options.optimizer, torch.optim.AdamW)
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=0.05)
    resume = load(options, rack, model, optimizer)
    config = mend.MendConfig(**options.config)
    with mend.session(model, config, optimizer, **resume) as runtime:
        result["begun"] = seen(runtime.status())
        for step in steps_of(options, runtime):
            optimizer.zero_grad()
            if options.synthetic:
                set_gradients(model, rack, step)
            else:
                trained.backward(rack, step)
            runtime.count_tokens(tokens_of(rack, step))
            optimizer.step()
            if folder := options.checkpoints.get(str(step)):
                checkpoint(options, runtime, model, optimizer, Path(folder))
        if options.merged:
            tell_merged(options, model, runtime)
    result["weights"] = {bare(name): each for name, each in weights(model).items()}
    result["status"] = seen(runtime.status())
    result["threads"] = train.mend_threads()
    train.leave_group()


if __name__ == "__main__":
    train.run_script(Options, run)
