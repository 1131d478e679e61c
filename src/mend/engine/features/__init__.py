"""engine.features: what the core does without. No room of the core imports it."""
