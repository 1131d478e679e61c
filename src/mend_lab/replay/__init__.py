"""replay: trains again under the decisions of tapes, and compares every digest.

A `ReplaySettings` is in force while the training script runs. It gives the ranks the settings of
the tapes and a `ReplayFactory`, which makes the parts that follow a tape.
"""
