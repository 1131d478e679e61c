"""events: what a process writes down about itself, one type per kind."""
