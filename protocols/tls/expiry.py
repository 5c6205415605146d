"""When a certificate expires, from its PEM file: Python's `ssl` says that only of certificates of peers. Pure.

A certificate is a sequence of DER values (RFC 5280, section 4.1): in the first of its parts, after the version, the
serial number, the algorithm and the issuer, comes the validity, which is two times.
"""

from __future__ import annotations

import binascii
import calendar
import re
import time

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
