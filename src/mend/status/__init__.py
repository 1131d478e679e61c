"""status: what a process answers about itself, and what it writes down: events and log lines."""
