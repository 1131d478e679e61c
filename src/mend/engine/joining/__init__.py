"""engine.joining: the training state besides the weights, on its way to racks that join."""
