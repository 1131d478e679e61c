"""engine.state: values that both halves of a rank read, the loop's and the training thread's."""
