"""`python -m mend_lab`: the commands of the laboratory."""

from mend_lab.commands import main

if __name__ == "__main__":
    main()
