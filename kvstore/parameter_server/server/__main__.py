"""Run the server of the job in the environment: `python -m gangline.kvstore.parameter_server.server`."""

import sys

from gangline.kvstore.parameter_server.server.server import main

if __name__ == "__main__":
    sys.exit(main())
