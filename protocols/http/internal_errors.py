"""What a client is told of an exception that nobody expected: a number to find it in the log, and nothing more."""

from __future__ import annotations

import logging
import secrets

logger = logging.getLogger(__name__)


def log_internal_error(what: str) -> str:
    """Log the exception that is being handled, raised by `what`, and return the text for the client."""
    number = secrets.token_hex(4)
    logger.exception("internal error %s in %s", number, what)
    return f"internal error (see {number} in the server's log)"
