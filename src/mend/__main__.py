"""`python -m mend` is `mend`."""

from mend.tools import main

main()
