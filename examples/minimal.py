"""The smallest job: a linear model on two racks. `mend launch --racks 2 examples/minimal.py`

An ordinary training loop. The lines of mend are marked; all addresses come from `mend launch`.
"""

from __future__ import annotations

import argparse

import torch

import mend


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps

    torch.manual_seed(0)  # so that `mend replay` begins with the same weights
    truth = torch.randn(32, 1, generator=torch.Generator().manual_seed(0))
    unseen = torch.randn(1000, 32, generator=torch.Generator().manual_seed(99))

    @torch.no_grad()
    def held_out(model: torch.nn.Module) -> float:
        return torch.nn.functional.mse_loss(model(unseen), unseen @ truth).item()

    model = torch.nn.Linear(32, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    config = mend.MendConfig(sync_period_steps=20, overlap_steps=5, fragments=1)  # mend
    with mend.session(model, config, optimizer) as runtime:  # mend
        # Every rack has data of its own. Version 0, the same on all racks, is rack 0's model.
        chance = torch.Generator().manual_seed(1 + runtime.status().rack)
        for step in range(runtime.status().step, steps):  # mend: 0, or another rack's when it joins
            inputs = torch.randn(64, 32, generator=chance)
            target = inputs @ truth + 0.5 * torch.randn(64, 1, generator=chance)
            loss = torch.nn.functional.mse_loss(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            runtime.count_tokens(len(inputs))  # mend: what this rack's work weighs in the merge
            optimizer.step()  # mend captures and applies what is due in here
            if step % 50 == 0:  # mend: this rack's and the merged model's loss, for `mend report`
                runtime.record(held_out=held_out(model))
                with runtime.anchor_weights():
                    runtime.record(held_out_merged=held_out(model))

    # After the `with` the model is the merged one: the same bits on every rack.
    status = runtime.status()
    error = (model.weight.detach().T - truth).norm() / truth.norm()
    print(
        f"rack={status.rack} step={status.step} versions={','.join(map(str, status.versions))} "
        f"digest={status.anchor_digest} error={error:.4f}"
    )


if __name__ == "__main__":
    main()
