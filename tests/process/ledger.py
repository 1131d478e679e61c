"""A rack of train.py that also keeps the books: does every update end up in exactly one place?

The one script here that looks behind the public API: the books need the offers themselves. Writes
`ledger`: per fragment what is missing or doubled, as a fraction of all movement.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import mend
from mend.engine.state.fragment_state import FragmentState, OpenOffer
from mend.engine.trainer.trainer import Trainer
from mend_lab.sim.vector_ledger import VectorLedger
from tests.process import train


class Books:
    """One ledger per fragment, fed around every step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.fragment_states: list[FragmentState] = []
        self.offers: dict[tuple[int, int], OpenOffer] = {}
        self.ledgers: list[VectorLedger] = []
        self._before: list[Tensor] = []
        # Registered before mend's own hook: sees the weights between the step and what mend does.
        optimizer.register_step_post_hook(lambda *_: self._stepped())

    def open(self, trainer: Trainer) -> None:
        self.fragment_states = trainer.fragment_states
        self.ledgers = [VectorLedger(state.owned.numel) for state in self.fragment_states]
        hand_over = trainer.parts.captured

        def captured(offer: OpenOffer) -> None:
            self.offers[offer.fragment, offer.seq] = offer
            hand_over(offer)

        trainer.parts = replace(trainer.parts, captured=captured)
        self.look()

    def look(self) -> None:
        """The next update begins here."""
        self._before = [theta(state) for state in self.fragment_states]

    def _stepped(self) -> None:
        for ledger, state, before in zip(
            self.ledgers, self.fragment_states, self._before, strict=True
        ):
            ledger.moved(before, theta(state))

    def closed(self, named: list[tuple[int, int]]) -> list[float]:
        """`named`: (fragment, seq) of the own offers that were merged. y = x - what is still
        owed."""
        for fragment, seq in named:
            offer = self.offers[fragment, seq]
            x_N = offer.delta_N if offer.residual_N is None else offer.delta_N + offer.residual_N
            y_N = x_N if offer.pend_N is None else x_N - offer.pend_N
            y_N = y_N if offer.sent_N is None else offer.sent_N
            self.ledgers[fragment].named(y_N)
        return [
            ledger.error(theta(state), state.anchor.values, state.residual_N)
            for ledger, state in zip(self.ledgers, self.fragment_states, strict=True)
        ]


def theta(state: FragmentState) -> Tensor:
    held_N = torch.empty(state.holding.everything.numel)
    state.view.read(state.holding.everything, held_N)
    return held_N


def main() -> None:
    torch.set_num_threads(1)
    options = train.Options(**json.loads(sys.argv[1]))
    rack = int(os.environ["MEND_RACK"])
    model = train.build(options.model, rack)
    optimizer = train.optimizer_of(model)
    books = Books(model, optimizer)
    config = mend.MendConfig(**options.config)
    runtime = mend.mend_init(model, config, optimizer)
    books.open(runtime._trainer)
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        train.loss_of(model, rack, 0, step).backward()
        runtime.count_tokens(train.tokens_of(rack, step))
        optimizer.step()
        books.look()
        time.sleep(options.pace_ms / 1000)
    mend.mend_shutdown(model, keep_local=True)
    status = train.seen(runtime.status())
    events = Path(config.diagnostics_dir or "") / f"events-rack{rack}-rank0.jsonl"
    applied = [e for e in map(json.loads, events.open()) if e["kind"] == "applied"]
    named = [(e["fragment"], e["seq"]) for e in applied if e["fate"] == "named"]
    out = Path(options.out.format(rank=0))
    told = {"ledger": books.closed(named), "named": len(named), "status": status}
    out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
