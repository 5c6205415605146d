"""What a client reads when the server raised an exception that nobody expected: a number, and nothing else.

The log has the exception with its traceback under the same number.
"""

from __future__ import annotations

import logging
import secrets

logger = logging.getLogger(__name__)


def report_internal_error(operation: str, error: BaseException) -> str:
    """Log `error`, which `operation` raised, and return the text for the client."""
    number = secrets.token_hex(4)
    logger.error("internal error %s in %s", number, operation, exc_info=error)
    return f"internal error (see {number} in the server's log)"
