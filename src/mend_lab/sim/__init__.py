"""sim: whole jobs under a virtual clock, with the faults drawn from one seed.

The host is replaced, the code is not. What runs here is what runs live: the machines of
`coordination`, `engine.loop`, `engine.trainer` and the numerics. Only sockets, threads and the
clock are simulated.
"""

from mend_lab.sim.generate import draw
from mend_lab.sim.scenario import WITNESS_TARGET as WITNESS
from mend_lab.sim.scenario import Fault, Scenario, python_of
from mend_lab.sim.shrink import problems_of, shrink
from mend_lab.sim.story import tell
from mend_lab.sim.world import SimulationReport, World

__all__ = [
    "WITNESS",
    "Fault",
    "Scenario",
    "SimulationReport",
    "World",
    "draw",
    "problems_of",
    "python_of",
    "shrink",
    "tell",
]
