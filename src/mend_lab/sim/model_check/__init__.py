"""sim.model_check: explores all orders of small worlds of the real classes."""
