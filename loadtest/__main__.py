"""`python -m loadtest`"""

import sys

from loadtest.interrupts import Interrupts

if __name__ == "__main__":
    with Interrupts() as interrupts:
        # Only now: these imports take most of a second, and a Ctrl-C may come meanwhile.
        from loadtest.command import main

        sys.exit(main(interrupts))
