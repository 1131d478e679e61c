"""engine.checkpoint: checkpoints of all racks at one record of the log."""
