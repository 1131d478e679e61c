"""benchmarks.small_problems_rank: one rack of benchmarks.small_problems, under `mend launch`.

Arguments: a folder for the result, the cell as JSON, the number of steps of the
fastest rack, the seed.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import torch

import mend
from benchmarks.small_problems import FRAGMENTS, Cell, Learner, speed_of

STEP_S = 0.01
"""Of the fastest rack. A step of a real model takes longer than a round trip; these ones take
0.2 ms."""


def main() -> None:
    torch.set_num_threads(1)
    folder, cell = Path(sys.argv[1]), Cell(*json.loads(sys.argv[2]))
    steps, seed = int(sys.argv[3]), int(sys.argv[4])
    config = mend.MendConfig(sync_period_steps=cell.period, fragments=FRAGMENTS)
    learner = Learner(cell, config.rack_number, seed)
    speed = float(speed_of(cell, config.rack_number))
    with mend.session(learner.model, config, learner.optimizer) as runtime:
        for step in range(1, math.floor(steps * speed) + 1):
            runtime.count_tokens(learner.train(step))
            time.sleep(STEP_S / speed)
    told = {
        "error": learner.problem.error(learner.weights_N).item(),
        "outcome": runtime.status().outcome,
    }
    (folder / f"{config.rack_number}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
