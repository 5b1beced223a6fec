"""Run the scheduler of the job in the environment: `python -m gangline.kvstore.parameter_server.scheduler`."""

import sys

from gangline.kvstore.parameter_server.scheduler.scheduler import main

if __name__ == "__main__":
    sys.exit(main())
