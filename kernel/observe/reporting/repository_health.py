"""Whether the server can still follow its model repositories."""

from __future__ import annotations


class RepositoryHealth:
    """What metrics and the page show of it; this one is of a server that does not poll."""

    #: How much work in the background has ended by an exception that nobody expected.
    background_failures = 0
    #: When the repositories were last polled without a failure, in seconds since the epoch; None if never.
    succeeded_s: float | None = None

    def trouble(self) -> str:
        """Return what is wrong with the polls now, in a sentence for people; empty if nothing is."""
        return ""
