"""Run the scheduler that the environment describes: `python -m gangline.kvstore.parameter_server.scheduler`."""

import sys

from gangline.kvstore.parameter_server.scheduler.scheduler import main

if __name__ == "__main__":
    sys.exit(main())
