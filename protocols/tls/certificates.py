"""The certificate of a front door while the server runs: new files are used without a restart, and the log says in time
that it expires.

The files are looked at from time to time, because programs that renew certificates (certbot, cert-manager) replace
files and cannot tell a server. Connections that are open keep what they have agreed on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kernel.files.file_threads import in_file_thread
from kernel.files.regular_files import read_regular
from kernel.observe.repeats.limited_log import LimitedLog
from kernel.options import BadOption
from protocols.tls.context import MAX_BYTE_SIZE, server_context
from protocols.tls.expiry import expiry_s

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from kernel.options import TlsOptions

logger = logging.getLogger(__name__)

#: Each look may fail.
_failures = LimitedLog(logger)

#: How often the files are looked at, in seconds.
LOOK_S = 10.0

#: From how long before it expires a certificate is warned of, and how often, in seconds.
WARN_BEFORE_S = 14 * 86400.0
WARN_EVERY_S = 86400.0

#: What a change of a file changes: modification time, size, inode.
_Stamp = tuple[tuple[int, int, int], ...]


class Certificates:
    """The files of one front door. `context` is for its listening socket."""

    def __init__(self, title: str, options: TlsOptions, application_protocols: Sequence[str] = ()) -> None:
        """`title` names the front door in the log. Reads the files; raises `BadOption`."""
        self._title = title
        self._options = options
        self._application_protocols = application_protocols
        #: Of the files that are used, or were reported as wrong.
        self._stamp = self._read_stamp()
        #: Of files that were wrong at the last look.
        self._wrong_stamp: _Stamp | None = None
        #: The context of new connections.
        self._current = self.context = server_context(options, application_protocols)
        self.context.sni_callback = self._choose  # called for each handshake, also without a name of the server
        #: When the certificate expires, in seconds since the epoch; None if the file does not say it as usual.
        self.expiry_s = _expiry_of(options)
        self._next_warning_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Warn of a certificate that expires soon, and look at the files from now on, until `stop`."""
        self._warn(time.time())
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_later)

    def stop(self) -> None:
        """End the looks. A second call does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        # In a thread: the files may be on a file system that does not respond.
        look = asyncio.ensure_future(in_file_thread(self.look, time.time()))
        look.add_done_callback(self._looked)

    def _looked(self, look: asyncio.Future[None]) -> None:
        if not look.cancelled() and (error := look.exception()) is not None:
            _failures.log(self._title, "%s could not look for a new certificate", self._title, exc_info=error)
        if self._timer is not None:  # not stopped
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_later)

    def look(self, now_s: float) -> None:
        """Use new files if there are some, and warn of a certificate that expires soon. Blocks."""
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._use_new(stamp)
        self._warn(now_s)

    def _use_new(self, stamp: _Stamp) -> None:
        try:
            context = server_context(self._options, self._application_protocols)
        except BadOption as error:
            # Between two steps of a renewal a key may belong to another certificate. At the next look it does not.
            if stamp == self._wrong_stamp:
                self._stamp = stamp
                logger.error("%s keeps the certificate that it has: %s", self._title, error)
            self._wrong_stamp = stamp
            return
        self._current, self._stamp, self._wrong_stamp = context, stamp, None
        self.expiry_s, self._next_warning_s = _expiry_of(self._options), 0.0
        logger.info("%s uses the new certificate '%s'%s", self._title, self._options.certificate, self._until())

    def _until(self) -> str:
        return "" if self.expiry_s is None else f", which expires at {_utc(self.expiry_s)}"

    def _warn(self, now_s: float) -> None:
        if self.expiry_s is None or self.expiry_s - now_s > WARN_BEFORE_S or now_s < self._next_warning_s:
            return
        self._next_warning_s = now_s + WARN_EVERY_S
        path, at = self._options.certificate, _utc(self.expiry_s)
        if self.expiry_s <= now_s:
            logger.error("the certificate '%s' of %s has expired at %s: clients refuse it", path, self._title, at)
        else:
            logger.warning("the certificate '%s' of %s expires at %s", path, self._title, at)

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._current

    def _read_stamp(self) -> _Stamp:
        """Return what changes when a file does, also when it is removed."""
        found = []
        for path in (self._options.certificate, self._options.key, self._options.client_ca):
            if path is None:
                continue
            try:
                status = path.stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)


def _expiry_of(options: TlsOptions) -> float | None:
    try:
        return expiry_s(read_regular(options.certificate, MAX_BYTE_SIZE))
    except OSError:
        return None


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
