"""engine.hooks: what watches a script: its optimizers, schedulers, weights and signals."""
