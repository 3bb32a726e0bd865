"""`python -m loadtest`"""

import sys

from loadtest.interrupts import Interrupts
from loadtest.slices import take_short_slices

if __name__ == "__main__":
    with Interrupts() as interrupts:
        # Only now: these imports take most of a second, and a Ctrl-C may come meanwhile.
        from loadtest.command import main

        take_short_slices()
        sys.exit(main(interrupts))
