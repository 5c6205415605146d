"""What the kernel and the process that reads clouds say to each other: a request, then progress, then a result.

Each message is in MessagePack behind its length, four bytes in network order. Paths of objects are below the folder of
the request's address.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: The longest message in bytes: the objects that are read together, or a part of a listing.
MAX_MESSAGE_BYTE_SIZE = 64 << 20

#: The most items of a list in one message.
MAX_ITEM_COUNT = 5000

#: Seconds without a request after which a process ends.
IDLE_S = 60.0

#: The most objects in a listing.
MAX_OBJECT_COUNT = 200_000


class StoredObject(msgspec.Struct, frozen=True, array_like=True):
    """An object of a store."""

    #: Below the folder that was listed; ends with a slash for a folder.
    name: str
    byte_size: int
    #: What changes with the content.
    etag: str
    modified_ns: int = 0


class Place(msgspec.Struct, frozen=True):
    """A folder in a cloud."""

    #: The name of the store's client in fsspec: s3, gs, abfs.
    protocol: str
    #: The bucket and the names below it.
    root: str
    #: Arguments of the client. They may have secrets: no log shows them.
    arguments: dict[str, Any]


class ListObjects(msgspec.Struct, frozen=True, tag=True):
    """List all objects in a folder below the place. The result is a list of `StoredObject`."""

    place: Place
    folder: str = ""


class ListFolders(msgspec.Struct, frozen=True, tag=True):
    """List the names of the folders in the place. The result is a list of names."""

    place: Place


class ReadObjects(msgspec.Struct, frozen=True, tag=True):
    """Read small objects. The result is the contents in the order of `names`; None for those that are gone."""

    place: Place
    names: list[str]
    #: As they were listed.
    byte_sizes: list[int]


class Download(msgspec.Struct, frozen=True, tag=True):
    """Write objects to files, each when all of it has arrived. The folders of the files are there.

    The result is None.
    """

    place: Place
    #: Object → path of the new file.
    files: dict[str, str]
    byte_sizes: dict[str, int]
    #: A folder on the same disk for files that are being received.
    incoming: str


Request = ListObjects | ListFolders | ReadObjects | Download


class Received(msgspec.Struct, frozen=True, tag=True):
    """How much has been received since the request: bytes of objects, or objects of a listing."""

    count: int


class Part(msgspec.Struct, frozen=True, tag=True):
    """The next items of a result that is a long list; `Result` has the last ones.

    Each takes the kernel few milliseconds: a decoder lets no other thread run.
    """

    #: In MessagePack.
    value: msgspec.Raw


class Result(msgspec.Struct, frozen=True, tag=True):
    """The end of a request that has succeeded."""

    #: In MessagePack.
    value: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The end of a request that has failed."""

    message: str


Response = Received | Part | Result | Failed
