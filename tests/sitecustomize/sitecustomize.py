"""Install scripted faults in each process of a job that a test's program starts (`scripted_faults.variables`)."""

import os
import sys
from pathlib import Path

if os.environ.get("GANGLINE_FAULT") and "DMLC_ROLE" in os.environ:
    sys.path.append(str(Path(__file__).parents[2]))
    import tests.scripted_faults  # noqa: F401
