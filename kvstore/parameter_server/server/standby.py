"""Process that imports what a server needs, reads its environment from standard input, and is that server then."""

import json
import os
import sys

from gangline.kvstore.parameter_server.server.server import main

if __name__ == "__main__":
    line = sys.stdin.buffer.readline()
    if not line:  # it was not needed
        sys.exit(0)
    os.environ.clear()
    os.environ.update(json.loads(line))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.exit(main())
