"""sim: whole jobs under a virtual clock, with the faults drawn from one seed.

The edge is replaced, the code is not. What runs here is what runs live: the machines of `protocol`,
`runtime.rank`, `runtime.steps` and the numerics. Only sockets, threads and the clock are simulated.
"""

from mend.sim.scenario import Scenario, draw
from mend.sim.world import Report, World

__all__ = ["Report", "Scenario", "World", "draw"]
