"""What the process that prepares an environment is asked for, and what it responds. One JSON each."""

from __future__ import annotations

import msgspec


class EnvironmentFailed(Exception):
    """The environment cannot be used. The message says why, for the operator."""


class EnvironmentRequest(msgspec.Struct, frozen=True):
    """An environment to prepare: one of the paths is set."""

    #: A folder with an environment, or an archive of one.
    path: str
    #: A file of requirements, whose packages are installed.
    requirements: str
    #: The folder that environments are made in, and the most bytes that all of them may have.
    cache_folder: str
    cache_byte_size: int


class EnvironmentPrepared(msgspec.Struct, frozen=True, tag=True):
    """An environment that can be used."""

    #: The path of its interpreter.
    interpreter: str
    #: Variables of a process that runs in it; None for one that must not be there.
    variables: dict[str, str | None]
    #: The file that is locked while the environment is used, and the one that is there while it is complete; "" for an
    #: environment that is not in the cache.
    lock: str = ""
    marker: str = ""
    #: The files that it was made of: when one of them changes, it has to be prepared again.
    files: list[str] = []


class EnvironmentRefused(msgspec.Struct, frozen=True, tag=True):
    """There is no environment, for this reason."""

    text: str


encode = msgspec.json.encode
response_decoder = msgspec.json.Decoder(EnvironmentPrepared | EnvironmentRefused)
request_decoder = msgspec.json.Decoder(EnvironmentRequest)
