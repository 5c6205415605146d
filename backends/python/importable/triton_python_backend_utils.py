"""Lets editors, type checkers and tests import `triton_python_backend_utils` by its name: add this folder to a path.

In a worker the server provides the module (`backends.python.triton_python_backend_utils.install`).
"""

from backends.python.triton_python_backend_utils import *  # noqa: F403 - its __all__ is the API
