"""benchmarks: figures, measured. Each module is run with `python -m benchmarks.<name>`."""
