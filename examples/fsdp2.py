"""FSDP2 inside each rack, mend between the racks: no rank ever holds the whole model or anchor.

mend launch --racks 2 --nproc-per-rack 2 examples/fsdp2.py --save merged.pt
"""

from __future__ import annotations

import argparse
import gc
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import mend

BYTES, CONTEXT, WIDTH, HEADS, BLOCKS, BATCH = 256, 64, 64, 4, 2, 8


class ByteGPT(nn.Module):
    """Next-byte model: bytes [B, T] -> logits [B * T, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, input_BT: Tensor) -> Tensor:
        length, device = input_BT.shape[1], input_BT.device
        past_TT = nn.Transformer.generate_square_subsequent_mask(length, device=device)
        x_BTW = self.bytes(input_BT) + self.places.weight[:length]
        for block in self.blocks:
            x_BTW = block(x_BTW, src_mask=past_TT, is_causal=True)
        logits_NV: Tensor = self.head(x_BTW.flatten(0, 1))
        return logits_NV


def text(part: int, parts: int) -> Tensor:
    """Every `parts`-th module of the standard library: real text without a download."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[part::parts]
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def batch_of(text_N: Tensor, chance: torch.Generator) -> Tensor:
    """Random windows of CONTEXT + 1 bytes."""
    starts = torch.randint(len(text_N) - CONTEXT, (BATCH,), generator=chance).tolist()
    return torch.stack([text_N[start : start + CONTEXT + 1] for start in starts]).long()


def loss_of(model: nn.Module, batch_BT: Tensor) -> Tensor:
    return cross_entropy(model(batch_BT[:, :-1]), batch_BT[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text_N: Tensor, device: torch.device) -> float:
    """Nats per byte of text that no rack trains on; the same windows in every call. Under FSDP2 a
    forward gathers weights, so all ranks of the rack call it together."""
    chance = torch.Generator().manual_seed(0)
    losses = [loss_of(model, batch_of(text_N, chance).to(device)) for _ in range(8)]
    return torch.stack(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--save", type=Path, help="the merged model, as one ordinary state dict")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")  # the ranks of this rack, as torchrun says
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = ByteGPT().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # First fully_shard, then the optimizer (it must see the shards), then mend.
    config = mend.MendConfig(sync_period_steps=40, overlap_steps=8, fragments=4)
    with mend.session(model, config, optimizer) as runtime:
        # A full garbage collection visits every object, and each rank makes it in another step.
        gc.collect()
        gc.freeze()
        rack, rank, racks = runtime.status().rack, dist.get_rank(), config.racks
        own_text, held_out = text(rack, racks + 1), text(racks, racks + 1)
        chance = torch.Generator().manual_seed(1000 * rack + rank)  # each rank its own windows
        for step in range(runtime.status().step + 1, options.steps + 1):  # goes on where it joins
            batch = batch_of(own_text, chance)
            loss = loss_of(model, batch.to(device))
            optimizer.zero_grad()
            loss.backward()
            runtime.count_tokens(batch[:, 1:].numel())  # what this rank's step weighs
            optimizer.step()  # mend captures and applies what is due in here
            if step % options.evaluate_every == 0:
                own = held_out_loss(model, held_out, device)  # of this rack's weights, unmerged
                if rank == 0:
                    print(f"rack={rack} step={step} loss={loss:.3f} held_out={own:.3f}", flush=True)

    # Behind the `with` the shards are the merged ones: the same bits in every rack.
    status, loss_held_out = runtime.status(), held_out_loss(model, held_out, device)
    if rank == 0:
        versions = ",".join(map(str, status.versions))
        result = f"digest={status.anchor_digest} held_out={loss_held_out:.4f}"
        print(f"rack={rack} step={status.step} versions={versions} {result}", flush=True)
    if options.save is not None and rack == 0:  # one copy is enough, the racks are equal
        # All ranks of the rack gather, tensor by tensor; only rank 0 keeps what it gets.
        whole = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if rank == 0:
            torch.save(whole, options.save)
    # torch keeps gloo's threads of a sharded model until the process ends. One that is letting go
    # of its last collective just then aborts the process, so wait until all ranks are through.
    dist.barrier()
    dist.destroy_process_group()  # after the session: mend meets in groups of its own


if __name__ == "__main__":
    main()
