"""engine: where decisions and tensors meet. Owns threads, clocks, files, logs; has no opinions."""
