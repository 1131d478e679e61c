"""commands: what `python -m mend_lab` does."""
