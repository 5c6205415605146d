"""Where a repository is and how it is reached: the address, and the credentials of a file that may change."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kernel.errors import InternalError
from kernel.files.regular_files import read_regular
from kernel.repository.clouds.credentials import (
    FILE_VARIABLE,
    BadCredentials,
    Credentials,
    client_arguments,
    parse_credentials,
)
from kernel.repository.clouds.messages import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.repository.clouds.address import CloudAddress

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
