"""`python -m tests.golden`: write the losses anew, of all networks or those named, after a change that changes them."""

import sys

from tests.golden import SHAPES, write

if __name__ == "__main__":
    write(sys.argv[1:] or SHAPES)
