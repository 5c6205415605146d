"""The error for a client when the server raised an exception that is not a `ServingError`.

Without file descriptors it is asked to try again. Anything else is a bug: the client gets a number and nothing else,
and the log has the exception with its traceback under the same number.
"""

from __future__ import annotations

import logging
import secrets

from kernel.errors import InternalError, NoDescriptorLeft, ServingError, lacks_descriptors

logger = logging.getLogger(__name__)


def unexpected_error(operation: str, error: BaseException) -> ServingError:
    """Return the error for the client of `operation`, which raised `error`. Logs what is a bug."""
    if lacks_descriptors(error):
        return NoDescriptorLeft()
    number = secrets.token_hex(4)
    logger.error("internal error %s in %s", number, operation, exc_info=error)
    return InternalError(f"internal error (see {number} in the server's log)")
