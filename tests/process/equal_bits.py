"""Trains a tiny Llama in many ways, each in processes of its own, and says what it came to.

    python -m tests.process.equal_bits STEPS:CASE...

One process loads torch and forks ranks, which meet in a file; cases of as many ranks share them.
Out: one line of JSON per case, with the digests of weights, optimizer and losses.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mend.determinism import (
    ColumnParallel,
    DeterministicTrainer,
    GatherTokens,
    RowParallel,
    SequenceParallel,
    SplitTokens,
    collectives,
    ddp_hook,
    digest,
    enable,
    fix_fsdp,
    optimizer_digest,
    sequences,
    weight_digest,
)
from mend.determinism import (
    cross_entropy as sharded_cross_entropy,
)
from tests.unit.determinism.llama import WORDS, Llama, loss_of

SEED, ROWS, TOKENS = 18, 8, 16
CLIP = 1.0
SMALL_BYTES = collectives.SMALL_BYTES


@dataclass(frozen=True)
class Case:
    """How the same training is cut."""

    kind: str  # one, ddp, fsdp, tp, sp; sequences of many lengths: padded, packed
    ranks: int = 1
    microbatches: int = 1
    fixed: bool = True  # the sums over ranks are mend's
    level: str = "shape"
    checkpointed: bool = False
    threads: int = 1
    fused: bool = False  # gate and up are one layer
    wide: bool = False  # enough for 8 ranks to cut two fused layers; 40 times the work
    cut_words: bool = True  # sp: the vocabulary, too, and the loss over it
    autocast: bool = False  # layers compute in bf16
    small: bool = True  # False: sums over ranks go as large ones do, however small they are


CASES = {
    "one": Case("one"), "one again": Case("one"), "threads": Case("one", threads=2),
    "checkpointed": Case("one", checkpointed=True), "microbatches 2": Case("one", microbatches=2),
    "microbatches 4": Case("one", microbatches=4), "ddp 2": Case("ddp", 2), "ddp 4": Case("ddp", 4),
    "ddp 4, as if large": Case("ddp", 4, small=False), "ddp 8": Case("ddp", 8),
    "ddp 2, microbatches 2": Case("ddp", 2, 2), "fsdp 2": Case("fsdp", 2),
    "fsdp 4": Case("fsdp", 4), "fsdp 2, microbatches 2": Case("fsdp", 2, 2, checkpointed=True),
    "tp 2": Case("tp", 2), "tp 4": Case("tp", 4),
    "tp 4, microbatches 2": Case("tp", 4, 2, small=False), "tp 8": Case("tp", 8),
    "tp 8, checkpointed": Case("tp", 8, checkpointed=True), "fused": Case("one", fused=True),
    "fused tp 2": Case("tp", 2, fused=True), "wide": Case("one", fused=True, wide=True),
    "wide sp 8": Case("sp", 8, fused=True, wide=True), "sp 2": Case("sp", 2, fused=True),
    "sp 2, whole head": Case("sp", 2, fused=True, cut_words=False),
    "sp 4": Case("sp", 4, fused=True),
    "sp 4, microbatches 2": Case("sp", 4, 2, fused=True, checkpointed=True, small=False),
    "sp 8": Case("sp", 8), "torch's tp 2": Case("tp", 2, fixed=False),
    "autocast": Case("one", autocast=True),
    "autocast, microbatches 4": Case("one", microbatches=4, autocast=True),
    "autocast, ddp 2": Case("ddp", 2, autocast=True),
    "autocast, fsdp 2": Case("fsdp", 2, 2, autocast=True),
    "autocast, tp 2": Case("tp", 2, autocast=True), "padded": Case("padded"),
    "packed": Case("packed"), "everywhere": Case("one", level="everywhere"),
    "everywhere, microbatches 4": Case("one", microbatches=4, level="everywhere"),
    "everywhere, ddp 2": Case("ddp", 2, 2, level="everywhere"),
    "everywhere, checkpointed": Case("one", checkpointed=True, level="everywhere"),
    "everywhere, padded": Case("padded", level="everywhere"),
    "everywhere, packed": Case("packed", level="everywhere"), "run: one": Case("one", level="run"),
    "run: microbatches 4": Case("one", microbatches=4, level="run"),
    "run: ddp 4": Case("ddp", 4, level="run", fixed=False),
    "unfixed ddp 4": Case("ddp", 4, fixed=False),
}  # fmt: skip


def train(case: Case, *after: int) -> dict[int, dict[str, str]]:
    """The digests of one rank after so many steps, of one training."""
    torch.set_num_threads(case.threads)
    collectives.SMALL_BYTES = SMALL_BYTES if case.small else 0
    group = dist.group.WORLD if case.kind in ("ddp", "fsdp") else None
    rank = dist.get_rank() if case.ranks > 1 else 0
    with enable(SEED, case.level):
        inner: nn.Module = Llama(
            layers=1, dropout=0.1, checkpointed=case.checkpointed, fused=case.fused,
            hidden=2048 if case.wide else 64,
        )  # fmt: skip
        model = wrapped(inner, case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        trainer = DeterministicTrainer(
            model,
            optimizer,
            SEED,
            level=case.level,
            microbatches=case.microbatches,
            group=group,
            grad_norm_max=CLIP,
        )
        loss_fn = loss_over_words if case.kind == "sp" and case.cut_words else loss_of
        losses, found = list[Tensor](), dict[int, dict[str, str]]()
        for step in range(max(after)):
            if case.kind in ("padded", "packed"):
                losses.append(ragged_step(trainer, case, batch(step)))
            else:
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    losses.append(trainer.step(mine(batch(step), case, rank), loss_fn))
            if step + 1 in after:
                found[step + 1] = {
                    "weights": weight_digest(model),
                    "optimizer": optimizer_digest(optimizer),
                    "losses": digest(losses),
                    "last loss": f"{losses[-1]:.4f}",
                }
        return found


def wrapped(model: nn.Module, case: Case) -> nn.Module:
    if case.kind == "ddp":
        model = DistributedDataParallel(model)
        if case.fixed:
            model.register_comm_hook(None, ddp_hook)
    if case.kind == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        if case.fixed:
            fix_fsdp(model)
    if case.kind == "tp":
        cut_layers(model, ColumnParallel if case.fixed else ColwiseParallel, case)
    if case.kind == "sp":
        cut_tokens(model, case)
    return model


def cut_layers(model: nn.Module, columns: Any, case: Case) -> None:
    mesh = init_device_mesh("cpu", (case.ranks,))
    rows = RowParallel if case.fixed else RowwiseParallel
    names = ("query", "key", "value", *(() if case.fused else ("gate", "up")))
    plan = {f"blocks.*.{name}": columns() for name in names}
    if case.fused:
        plan["blocks.*.gate_up"] = ColumnParallel(fused=2)
    plan |= {f"blocks.*.{name}": rows() for name in ("out", "down")}
    parallelize_module(model, mesh, plan)


def cut_tokens(model: nn.Module, case: Case) -> None:
    """Sequence parallelism: between the linear layers a rank has its share of the tokens."""
    columns = partial(ColumnParallel, tokens_cut=True)
    plan: dict[str, ParallelStyle] = {"embedding": SplitTokens(), "norm": SequenceParallel()}
    plan |= {f"blocks.*.{name}": columns() for name in ("query", "key", "value")}
    if case.fused:
        plan["blocks.*.gate_up"] = columns(fused=2)
    else:
        plan |= {f"blocks.*.{name}": columns() for name in ("gate", "up")}
    plan |= {f"blocks.*.{name}": RowParallel(tokens_cut=True) for name in ("out", "down")}
    for name in ("norm_in", "norm_mid", "dropout"):
        plan[f"blocks.*.{name}"] = SequenceParallel()
    plan["head"] = columns() if case.cut_words else GatherTokens()
    parallelize_module(model, init_device_mesh("cpu", (case.ranks,)), plan)


def loss_over_words(model: nn.Module, words_BT: Tensor) -> Tensor:
    """loss_of() where every rank has its share of the vocabulary."""
    logits = model(words_BT[:, :-1])
    return sharded_cross_entropy(logits.flatten(0, 1), words_BT[:, 1:].flatten())


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (ROWS, TOKENS + 1), generator=generator)


def mine(rows: Tensor, case: Case, rank: int) -> Tensor:
    """Of the global batch the rows of this rank: microbatch by microbatch, rank by rank."""
    if case.kind in ("tp", "sp"):
        return rows
    cut = rows.view(case.microbatches, case.ranks, -1, rows.shape[1])
    return cut[:, rank].reshape(-1, rows.shape[1])


def ragged_step(trainer: DeterministicTrainer, case: Case, rows: Tensor) -> Tensor:
    """The rows cut to lengths of their own: with padding behind, or one behind another."""
    lengths = [3 + int(row[0]) % (TOKENS - 2) for row in rows]
    words, targets = rows[:, :-1], rows[:, 1:]
    if case.kind == "packed":
        positions = torch.cat([torch.arange(length) for length in lengths])

        def cut(x: Tensor) -> Tensor:
            return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])

        with sequences(lengths):
            return trainer.step(
                cut(words)[None], lambda model, x: summed(model(x, positions), cut(targets))
            )
    padding = torch.arange(TOKENS) >= torch.tensor(lengths)[:, None]
    targets = targets.masked_fill(padding, -100)
    return trainer.step(
        words.masked_fill(padding, 0), lambda model, x: summed(model(x), targets.flatten())
    )


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Over a constant: a mean over the words of a batch would depend on how many these are."""
    loss = cross_entropy(logits.flatten(0, 1), targets, reduction="sum", ignore_index=-100)
    return loss / (ROWS * TOKENS)


Asked = list[tuple[int, str]]
"""Steps, case."""


def child(asked: Asked, folder: Path, rank: int) -> None:
    ranks = CASES[asked[0][1]].ranks
    if ranks > 1:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    found: dict[str, dict[int, dict[str, str]]] = {}
    for name in dict.fromkeys(name for _, name in asked):
        after = [steps for steps, each in asked if each == name]
        try:
            found[name] = train(CASES[name], *after)
        except Exception as fault:
            said = {"fault": f"{type(fault).__name__}: {fault}", "trace": traceback.format_exc()}
            found[name] = dict.fromkeys(after, said)
    (folder / f"{rank}.json").write_text(json.dumps([found[name][n] for n, name in asked]))


def begin(asked: Asked, folder: Path) -> list[int]:
    """Fork the ranks."""
    children = []
    for rank in range(CASES[asked[0][1]].ranks):
        pid = os.fork()
        if pid == 0:
            try:
                child(asked, folder, rank)
            finally:
                os._exit(0)
        children.append(pid)
    return children


def finish(asked: Asked, folder: Path, children: list[int]) -> None:
    """Wait for the ranks, which must say the same, and tell it."""
    for pid in children:
        os.waitpid(pid, 0)
    said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(children))]
    assert all(each == said[0] for each in said), said
    for (steps, name), found in zip(asked, said[0], strict=True):
        print(json.dumps({"name": name, "steps": steps, "found": found}), flush=True)


def together(asked: Asked) -> list[Asked]:
    """Cases of as many ranks; those whose sums are not mend's have processes of their own."""
    groups: dict[object, Asked] = {}
    for steps, name in asked:
        case = CASES[name]
        plain = case.fixed and case.level == "shape"
        groups.setdefault(case.ranks if plain else name, []).append((steps, name))
    return list(groups.values())


def main() -> None:
    train(CASES["one"], 1)  # what the first step imports, and checks of the machine, once for all
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    gc.freeze()  # a collection would make each child write to, and so copy, all of the heap
    asked = [
        (int(steps), name) for steps, _, name in (each.partition(":") for each in sys.argv[1:])
    ]
    with tempfile.TemporaryDirectory() as name:
        beside = []
        for number, group in enumerate(together(asked)):
            folder = Path(name, str(number))
            folder.mkdir()
            begun = group, folder, begin(group, folder)
            if len(begun[2]) == 1:  # leaves a core free
                beside.append(begun)
            else:
                finish(*begun)
        for begun in beside:
            finish(*begun)


if __name__ == "__main__":
    main()
