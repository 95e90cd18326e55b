"""What tests/conftest.py starts beside the tests: the audits that test_crosscompile.py asks for.

Argument: the folder that they are written to.
"""

import os
import sys
from pathlib import Path

from jetfire.tests.test_crosscompile import audits_in

os.nice(19)  # no test waits for a core that this has
audits_in(Path(sys.argv[1]))
