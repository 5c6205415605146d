"""The address of a repository in a cloud, in the forms that tritonserver takes. Pure.

s3://BUCKET/FOLDER                     Amazon S3
s3://HOST:PORT/BUCKET/FOLDER           a compatible store over HTTP; s3://https://HOST:PORT/... over HTTPS
gs://BUCKET/FOLDER                     Google Cloud Storage
as://ACCOUNT/CONTAINER/FOLDER          Azure Blob Storage
"""

from __future__ import annotations

import re

import msgspec

from kernel.errors import BadOption

#: What an address begins with, and the cloud's name.
CLOUDS = {"s3": "Amazon S3", "gs": "Google Cloud Storage", "as": "Azure Blob Storage"}

#: An S3 address with a host. Amazon's own addresses have no port.
_HOST_AND_PORT = re.compile(r"(https?://)?((?:[\w.-]+|\[[0-9a-fA-F:]+\]):[0-9]+)(?:/(.*))?", re.ASCII)
_BUCKET = re.compile(r"[\w.-]+", re.ASCII)


class BadAddress(BadOption):
    """A text begins like an address of a cloud and is none. The message says what was expected."""


class CloudAddress(msgspec.Struct, frozen=True):
    """A folder in a cloud."""

    #: A key of `CLOUDS`.
    cloud: str
    bucket: str
    #: Names with a slash between them; empty for the bucket itself.
    folder: str = ""
    #: `http://HOST:PORT` or `https://HOST:PORT` of a store that is compatible with S3; empty for the cloud's own.
    endpoint: str = ""
    #: Azure's account.
    account: str = ""

    def __str__(self) -> str:
        host = self.endpoint.removeprefix("http://")
        return "/".join(part for part in (f"{self.cloud}:/", host, self.account, self.bucket, self.folder) if part)

    @property
    def root(self) -> str:
        """The folder as clients of the stores write it: the bucket and the names below it."""
        return f"{self.bucket}/{self.folder}" if self.folder else self.bucket


def is_address(text: str) -> bool:
    """Whether a repository of the command line is in a cloud."""
    return text.partition("://")[0] in CLOUDS and "://" in text


def parse_address(text: str) -> CloudAddress:
    """Parse the address of a repository. Raises `BadAddress`."""
    cloud, _, rest = text.partition("://")
    endpoint = account = ""
    if cloud == "s3":
        found = _HOST_AND_PORT.fullmatch(rest)
        if found is not None:
            endpoint, rest = (found[1] or "http://") + found[2], found[3] or ""
        elif "://" in rest:
            raise BadAddress(f"'{text}' has no port: expected s3://https://HOST:PORT/BUCKET/FOLDER")
    parts = [part for part in rest.split("/") if part]
    if cloud == "as":
        account, parts = (parts[0] if parts else ""), parts[1:]
    expected = {"s3": "s3://BUCKET/FOLDER", "gs": "gs://BUCKET/FOLDER", "as": "as://ACCOUNT/CONTAINER/FOLDER"}[cloud]
    if not parts or (cloud == "as" and not account):
        raise BadAddress(f"'{text}' names no {'container' if cloud == 'as' else 'bucket'}: expected {expected}")
    if _BUCKET.fullmatch(parts[0]) is None:
        raise BadAddress(f"'{parts[0]}' cannot be the name of a {'container' if cloud == 'as' else 'bucket'}")
    if any(part in (".", "..") or not part.isprintable() for part in parts):
        raise BadAddress(f"'{text}' has a name that is '.', '..' or not printable")
    return CloudAddress(cloud, parts[0], "/".join(parts[1:]), endpoint, account)
