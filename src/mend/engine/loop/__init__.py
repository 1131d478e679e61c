"""engine.loop: the loop's half of a rank. It gives the machines events and performs effects."""
