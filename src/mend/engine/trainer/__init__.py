"""engine.trainer: the training thread's half of a rank. It captures and applies."""
