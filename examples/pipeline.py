"""A pipeline of two stages inside each rack, mend between the racks: rank 0 of a rack has the first
half of the model, rank 1 the second.

mend launch --racks 2 --nproc-per-rack 2 examples/pipeline.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from fsdp2 import BLOCKS, ByteGPT, batch_of, text
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import mend

MICRO_BATCHES = 4


class Stage(ByteGPT):
    """A stage of the model. Its parameters keep the names that they have in the whole model, by
    which mend distinguishes those of the stages."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.own = range(stage * BLOCKS // stages, (stage + 1) * BLOCKS // stages)
        for block in set(range(BLOCKS)).difference(self.own):
            self.blocks[block] = nn.Identity()
        if not self.is_first:
            self.bytes = self.places = None
        if not self.is_last:
            self.head = None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.bytes(x) + self.places.weight[: x.shape[1]]
        past_TT = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.own:
            x = self.blocks[block](x, src_mask=past_TT, is_causal=True)
        return self.head(x) if self.is_last else x


def loss_of(logits_BTV: Tensor, next_BT: Tensor) -> Tensor:
    return cross_entropy(logits_BTV.flatten(0, 1), next_BT.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()

    dist.init_process_group("gloo")  # the ranks of this rack, as torchrun says
    stage, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Stage(stage, stages)
    pipeline = Schedule1F1B(
        PipelineStage(model, stage, stages, torch.device("cpu")), MICRO_BATCHES, loss_of
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    config = mend.MendConfig(sync_period_steps=40, overlap_steps=8, fragments=4)
    with mend.session(model, config, optimizer) as runtime:
        rack, racks, losses = runtime.status().rack, config.racks, list[Tensor]()
        own_text, held_out = text(rack, racks + 1), text(racks, racks + 1)
        chance = torch.Generator().manual_seed(rack)  # all stages of a rack draw the same batches
        for step in range(runtime.status().step + 1, options.steps + 1):
            batch = batch_of(own_text, chance)
            optimizer.zero_grad()
            inputs = [batch[:, :-1]] if model.is_first else []
            target = {"target": batch[:, 1:]} if model.is_last else {}
            losses.clear()
            pipeline.step(*inputs, **target, losses=losses)
            runtime.count_tokens(batch[:, 1:].numel())  # the same on all stages
            optimizer.step()
            if losses and step % 100 == 0:  # on the last stage
                mean = torch.stack(losses).mean()
                print(f"rack={rack} step={step} loss={mean:.3f}", flush=True)

    # Behind the `with` every stage is the merged one: the same bits in every rack.
    batch, losses = batch_of(held_out, torch.Generator().manual_seed(0)), []
    inputs = [batch[:, :-1]] if model.is_first else []
    pipeline.eval(*inputs, target=batch[:, 1:] if model.is_last else None, losses=losses)
    if model.is_last:
        status = runtime.status()
        versions = ",".join(map(str, status.versions))
        result = f"digest={status.anchor_digest} held_out={torch.stack(losses).mean():.4f}"
        print(f"rack={rack} step={status.step} versions={versions} {result}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
