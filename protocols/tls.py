"""The certificate of a front door: new files without a restart, and when it expires.

`kernel.certificates` makes the `ssl.SSLContext` from the files; a mistake in them stops the start with an error of one
line.

`expiry_s` finds out when a certificate expires: Python's `ssl` says this only for certificates of peers. A certificate
is a sequence of DER values (RFC 5280, section 4.1): in the first of its parts, after the version, the serial number,
the algorithm and the issuer, comes the validity, which is two times.

`Certificates` looks at the files from time to time, because programs that renew certificates (certbot, cert-manager)
replace files and cannot tell a server. The log says in time that a certificate expires. Connections that are open keep
what they have agreed on.
"""

from __future__ import annotations

import binascii
import calendar
import logging
import re
import time
from typing import TYPE_CHECKING

from kernel.certificates import MAX_BYTE_SIZE, server_context
from kernel.errors import BadOption
from kernel.regular_files import read_regular
from protocols.file_watch import FileWatch

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from kernel.options import TlsOptions

_PEM = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.+?)-----END", re.DOTALL)

#: Tags of DER.
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


def expiry_s(pem: bytes) -> float | None:
    """Return when the first certificate of a PEM file expires, in seconds since the epoch; None if none is found."""
    found = _PEM.search(pem)
    try:
        return None if found is None else _expiry_s(binascii.a2b_base64(found[1]))
    except (ValueError, IndexError):
        return None


def _expiry_s(certificate: bytes) -> float:
    """As `expiry_s`, of a certificate in DER. Raises ValueError or IndexError."""
    tag, content, _ = _value(certificate)
    signed_tag, signed, _ = _value(content)
    if tag != _SEQUENCE or signed_tag != _SEQUENCE:
        raise ValueError("no certificate")
    before_validity = 3
    tag, _, rest = _value(signed)
    if tag != _VERSION:  # a certificate of version 1 does not say it
        rest = signed
    for _ in range(before_validity):
        _, _, rest = _value(rest)
    _, validity, _ = _value(rest)
    _, _, rest = _value(validity)
    tag, end, _ = _value(rest)
    return _seconds(tag, end.decode("ascii"))


def _value(data: bytes) -> tuple[int, bytes, bytes]:
    """Return tag and content of the first value of `data`, and what follows it."""
    tag, length, begin = data[0], data[1], 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(data[2:begin], "big")
    end = begin + length
    if end > len(data):
        raise ValueError("a value that is cut")
    return tag, data[begin:end], data[end:]


def _seconds(tag: int, text: str) -> float:
    if tag not in (_UTC_TIME, _GENERALIZED_TIME):
        raise ValueError("no time")
    if tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    return calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ"))


logger = logging.getLogger(__name__)

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
        failure = f"{title} could not look for a new certificate"
        self._watch = FileWatch(lambda: self.look(time.time()), LOOK_S, failure)

    def start(self) -> None:
        """Warn of a certificate that expires soon, and look at the files from now on, until `stop`."""
        self._warn(time.time())
        self._watch.start()

    def stop(self) -> None:
        """End the looks. A second call does nothing."""
        self._watch.stop()

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
