"""`python -m mend` is `mend`."""

from mend.cli import main

main()
