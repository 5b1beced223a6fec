"""`python -m tests.golden`: write the losses anew, after a change that is meant to change them."""

from tests.golden import write

if __name__ == "__main__":
    write()
