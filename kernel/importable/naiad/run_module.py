"""`python run_module.py MODULE ...` is `python -m MODULE ...` for our modules, see `naiad.packages`.

The server starts its processes so where PYTHONPATH has packages of other people that are called as ours.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from naiad.packages import share_names

    share_names()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
