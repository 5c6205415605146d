"""Where a repository in a cloud is and how it is reached: the address, and credentials of a file that may change.

Credentials are what Triton reads, as arguments of the stores' clients. Without a file the clients look themselves: the
usual environment variables, files in the home folder, and what the machine has a right to. A file in JSON
(TRITON_CLOUD_CREDENTIAL_PATH) has credentials for single buckets and folders:

    {"s3": {"": {"key_id": "...", "secret_key": "...", "region": "...", "session_token": "...", "profile": "..."},
            "s3://other-bucket": {...}},
     "gs": {"": "PATH OF A KEY FILE"},
     "as": {"": {"account_str": "ACCOUNT", "account_key": "..."}}}

Of all entries of a cloud that an address begins with, the longest is used, as in Triton.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError
from kernel.regular_files import read_regular
from kernel.repository.clouds.messages import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.repository.clouds.address import CloudAddress

#: Names a file with credentials. Triton has it, too.
FILE_VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"


class BadCredentials(Exception):
    """The file of credentials cannot be used. The message names the place, and has no value of it."""


class _S3(msgspec.Struct, frozen=True):
    key_id: str = ""
    secret_key: str = ""
    region: str = ""
    session_token: str = ""
    profile: str = ""


class _Azure(msgspec.Struct, frozen=True):
    account_str: str = ""
    account_key: str = ""


class Credentials(msgspec.Struct, frozen=True):
    """The content of a file: address → credentials, by cloud. The address "" stands for all others."""

    s3: dict[str, _S3] = {}
    gs: dict[str, str] = {}
    azure: dict[str, _Azure] = msgspec.field(default={}, name="as")


def parse_credentials(content: bytes) -> Credentials:
    """Parse the content of a file. Raises `BadCredentials`."""
    try:
        return msgspec.json.decode(content, type=Credentials)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadCredentials(str(error)) from None


def client_arguments(address: CloudAddress, given: Credentials, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of the store's client in fsspec: credentials, and where the store is."""
    text = str(address)
    if address.cloud == "s3":
        return _s3_arguments(address, _of_longest(text, given.s3))
    if address.cloud == "gs":
        key_file = _of_longest(text, given.gs)
        return {"token": key_file} if key_file else {}
    found = _of_longest(text, given.azure)
    own = environment.get("AZURE_STORAGE_ACCOUNT", "") in ("", address.account)
    key = found.account_key if found is not None else environment.get("AZURE_STORAGE_KEY", "") if own else ""
    # Without a key: what the machine or the user has a right to (azure-identity), not anonymous access.
    return {"account_name": address.account} | ({"account_key": key} if key else {"anon": False})


def _s3_arguments(address: CloudAddress, found: _S3 | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if found is not None:
        named = {
            "key": found.key_id, "secret": found.secret_key, "token": found.session_token, "profile": found.profile,
        }  # fmt: skip
        arguments = {name: value for name, value in named.items() if value}
        if found.region:
            arguments["client_kwargs"] = {"region_name": found.region}
    if address.endpoint:
        arguments["endpoint_url"] = address.endpoint
    return arguments


def _of_longest(address: str, given: Mapping[str, Any]) -> Any:
    """Return the value of the longest key that is `address` or a folder above it; None if there is none."""
    names = [name for name in given if not name or f"{address}/".startswith(f"{name.rstrip('/')}/")]
    return given[max(names, key=len)] if names else None


logger = logging.getLogger(__name__)

#: Cloud → name of its client in fsspec.
_PROTOCOLS = {"s3": "s3", "gs": "gs", "as": "abfs"}


#: The most bytes of a file of credentials that are read.
_MAX_BYTE_SIZE = 1 << 20


class RepositoryPlace:
    """The place of a repository. A file of credentials is read again when it has changed. All methods block."""

    def __init__(self, address: CloudAddress, environment: Mapping[str, str] = os.environ) -> None:
        """Raises `InternalError` for bad credentials."""
        self._address = address
        self._environment = environment
        self._file = environment.get(FILE_VARIABLE, "")
        self._seen = self._state()
        self._place = self._read()

    def now(self) -> Place:
        """Return the place with the present credentials: the former ones if the file cannot be read."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._place = self._read()
            except InternalError as error:
                logger.warning("the former credentials for %s are used on: %s", self._address, error.message)
        return self._place

    def _state(self) -> tuple[int, ...]:
        """Return what changes with the file."""
        try:
            status = os.stat(self._file)
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _read(self) -> Place:
        credentials = Credentials()
        if self._file:
            try:
                credentials = parse_credentials(read_regular(self._file, _MAX_BYTE_SIZE))
            except (OSError, BadCredentials) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise InternalError(
                    f"failed to read credentials from '{self._file}' ({FILE_VARIABLE}): {reason}"
                ) from None
        address = self._address
        return Place(_PROTOCOLS[address.cloud], address.root, client_arguments(address, credentials, self._environment))
