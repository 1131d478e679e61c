"""`python -m mend.tools` is `mend`."""

from mend.tools import main

main()
