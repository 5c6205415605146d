"""The error for a client when the server raised an exception that is not a `ServingError`.

Without file descriptors it is asked to try again. Anything else is a bug: the client gets a number and nothing else,
and the log has the exception with its traceback under the same number. Where many are equal, they have the number of
the last one that was logged.
"""

from __future__ import annotations

import logging
import secrets

from kernel.errors import InternalError, NoDescriptorLeft, ServingError, lacks_descriptors
from kernel.observe.limited_log import LimitedLog

_log = LimitedLog(logging.getLogger(__name__))

#: By the name of the exception's class: the number of the last one in the log.
_last_logged: dict[str, str] = {}


def unexpected_error(operation: str, error: BaseException) -> ServingError:
    """Return the error for the client of `operation`, which raised `error`. Logs what is a bug."""
    if lacks_descriptors(error):
        return NoDescriptorLeft()
    number, kind = secrets.token_hex(4), type(error).__name__
    if _log.log(f"the server ({kind})", "internal error %s in %s", number, operation, exc_info=error):
        _last_logged[kind] = number
    return InternalError(f"internal error (see {_last_logged.get(kind, number)} in the server's log)")
