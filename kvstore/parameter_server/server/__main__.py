"""Run the server of the job in the environment: `python -m gangline.kvstore.parameter_server.server`."""

import os
import sys

from gangline.collectives.processes.parent_death import die_with_parent

if __name__ == "__main__" and "GANGLINE_PARENT" in os.environ:  # before the imports that take seconds
    die_with_parent(int(os.environ.pop("GANGLINE_PARENT")))

from gangline.kvstore.parameter_server.server.server import main

if __name__ == "__main__":
    sys.exit(main())
