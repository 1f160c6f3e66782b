# SPDX-License-Identifier: Apache-2.0
"""Entry of ddipd's processes: `python <dir>/ddip_worker`, with the configuration as JSON on fd 0.

The folder is version-locked to the daemon and is not installed in the user's environment, so it is
put on sys.path only while it is being imported.
"""

import os
import sys


def _main():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(here)
    from ddip_worker import process

    sys.path[0] = ""  # as in a notebook: the working folder
    process.main()


_main()
