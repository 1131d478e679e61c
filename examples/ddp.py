"""DDP inside each rack, mend between the racks: a small GPT learns Python's own sources.

mend launch --racks 2 --nproc-per-rack 2 examples/ddp.py
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

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
    """Nats per byte of text that no rack trains on; the same windows in every call."""
    chance = torch.Generator().manual_seed(0)
    losses = [loss_of(model, batch_of(text_N, chance).to(device)) for _ in range(8)]
    return torch.stack(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")  # the ranks of this rack, as torchrun says

    torch.manual_seed(0)
    model = DistributedDataParallel(ByteGPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # First DDP, then the optimizer, then mend. All addresses come from the environment.
    config = mend.MendConfig(sync_period_steps=40, overlap_steps=8, fragments=4)
    with mend.session(model, config, optimizer) as runtime:
        rack, rank, racks = runtime.status().rack, dist.get_rank(), config.racks
        own_text, held_out = text(rack, racks + 1), text(racks, racks + 1)
        chance = torch.Generator().manual_seed(1000 * rack + rank)  # each rank its own windows
        for step in range(runtime.status().step + 1, steps + 1):  # goes on where it joins
            batch = batch_of(own_text, chance)
            loss = loss_of(model, batch.to(device))
            optimizer.zero_grad()
            loss.backward()
            runtime.count_tokens(batch[:, 1:].numel())  # what this rank's step weighs
            optimizer.step()  # mend captures and applies what is due in here
            if step % 50 == 0:
                runtime.record(loss=loss.item())  # for `mend report`
                if rank == 0:
                    print(f"rack={rack} step={step} loss={loss.item():.3f}", flush=True)

    # Behind the `with` the model is the merged one: the same bits on every rank of every rack.
    status, loss_held_out = runtime.status(), held_out_loss(model, held_out, device)
    if rank == 0:
        versions = ",".join(map(str, status.versions))
        result = f"digest={status.anchor_digest} held_out={loss_held_out:.4f}"
        print(f"rack={rack} step={status.step} versions={versions} {result}", flush=True)
    dist.destroy_process_group()  # after the session: mend meets in groups of its own


if __name__ == "__main__":
    main()
