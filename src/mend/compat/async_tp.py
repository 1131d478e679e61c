"""Nothing: see `absent`."""

from mend.compat.absent import absent

raise absent(__name__)
