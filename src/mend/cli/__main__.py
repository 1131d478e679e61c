"""cli: `python -m mend.cli` is `mend`."""

from mend.cli import main

main()
