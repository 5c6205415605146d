"""The agent `checksum`: a model is loaded only if its files have the digests that its configuration says.

Each parameter is `ALGORITHM:FILE` → the digest in hexadecimal digits. Texts are those of Triton's agent, which knows
MD5 only. An attacker can make two files with one MD5 digest: prefer SHA256.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument, Unsupported
from kernel.files.regular_files import open_regular
from kernel.repository.agents.interface import RepositoryAgent

if TYPE_CHECKING:
    from pathlib import Path

_ALGORITHMS = {"md5": "MD5", "sha256": "SHA256", "sha512": "SHA512"}


class ChecksumAgent(RepositoryAgent):
    """Compares digests in `load`, and changes nothing."""

    def load(self) -> None:
        """Raises `InvalidArgument` or `Unsupported` for the first file without its digest, or wrong parameter."""
        for key, expected in sorted(self.model.parameters.items()):
            algorithm, colon, name = key.partition(":")
            if not colon:
                raise InvalidArgument(f"failed to parse key: {key}")
            title = _ALGORITHMS.get(algorithm.lower())
            if title is None:
                raise Unsupported(f"Unsupported checksum algorithm: {algorithm}")
            found = _digest(self.model.folder, name, title)
            if found != expected:
                raise InvalidArgument(f"Mismatched {title} hash for file {name}, expect: {expected}, got: {found}")


def _digest(folder: Path, name: str, title: str) -> str:
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise InvalidArgument(f"file '{name}' of a checksum is outside of the model's folder")
        with open(open_regular(path), "rb") as file:
            return hashlib.file_digest(file, title.lower()).hexdigest()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(f"failed to open text file for read {name}: {reason}") from error
