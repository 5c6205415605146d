"""What the process that reads clouds does: requests to the clients of the stores, by fsspec. Blocks.

All stores that fsspec has a client for would do; the errors of the three clouds are known here.
"""

from __future__ import annotations

import datetime
import importlib
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.repository.clouds.download import StoreError, download
from kernel.repository.clouds.messages import (
    MAX_OBJECT_COUNT,
    Download,
    ListFolders,
    ListObjects,
    ReadObjects,
    StoredObject,
)
from kernel.texts import install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kernel.repository.clouds.messages import Place, Request

#: Protocol → module with the client, its class, and the extra of the package that brings it.
_CLIENTS = {
    "s3": ("s3fs", "S3FileSystem", "s3"),
    "gs": ("gcsfs", "GCSFileSystem", "gs"),
    "abfs": ("adlfs", "AzureBlobFileSystem", "azure"),
}

#: How many small objects are read at the same time.
_AT_ONCE = 8

#: How many clients are kept.
_CLIENT_COUNT = 16

#: After how many objects of a listing progress is reported.
_PAGE = 1000

#: In seconds. The kernel ends this process if nothing arrives for longer.
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 10, 30

#: The variables of the environment with which the clients of the stores sign.
_SECRET_VARIABLE = re.compile(r"(AWS|AZURE|GOOGLE)_\w*(KEY|KEY_ID|SECRET|TOKEN|PASSWORD|CONNECTION_STRING)")

#: Signatures in addresses.
_SIGNATURE = re.compile(r"((?:sig|[\w-]*signature|[\w-]*credential|[\w-]*token)=)[^&\s'\"]+", re.IGNORECASE)

#: Types of errors of the clients' libraries, by name, and what they mean for an operator.
_MEANINGS = {
    "NoCredentialsError": "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "PartialCredentialsError": "the credentials are incomplete",
    "ProfileNotFound": "there is no such profile in ~/.aws/config or ~/.aws/credentials",
    "DefaultCredentialsError": "there are no credentials: set GOOGLE_APPLICATION_CREDENTIALS to a key file",
    "ClientAuthenticationError": "the credentials were refused: set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY",
    "PermissionError": "access was denied",
    "FileNotFoundError": "there is no such bucket or object",
    "EndpointConnectionError": "the store cannot be reached",
}


class Stores:
    """The clients of the stores. One is made for each place, and kept until there are newer ones."""

    def __init__(self) -> None:
        self._clients: dict[bytes, Any] = {}

    def answer(self, request: Request, progress: Callable[[int], None]) -> Any:
        """Return the result of a request; `progress` gets how many bytes have arrived. Raises `StoreError`."""
        client = self._client(request.place)
        root = request.place.root
        try:
            client.invalidate_cache()
            match request:
                case ListObjects(folder=folder):
                    return _list(client, request.place, folder, progress)
                case ListFolders():
                    return _folders(client, root)
                case ReadObjects():
                    return _read(client, request, progress)
                case Download():
                    return download(request, lambda name, *limits: _part(client, f"{root}/{name}", *limits), progress)
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(_text(error, request.place)) from error

    def _client(self, place: Place) -> Any:
        key = msgspec.json.encode([place.protocol, place.arguments])
        if key not in self._clients:
            module, name, extra = _CLIENTS[place.protocol]
            # gcsfs would also speak gRPC, for buckets with folders of their own. It needs more time and memory then.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
            try:
                kind = getattr(importlib.import_module(module), name)
            except ImportError as error:
                raise StoreError(f"the package {module} is missing ({error}): {install_command(extra)}") from None
            while len(self._clients) >= _CLIENT_COUNT:  # their credentials may have been replaced
                del self._clients[next(iter(self._clients))]
            try:
                self._clients[key] = kind(**place.arguments, **_settings(place))
            except Exception as error:
                raise StoreError(_text(error, place)) from error
        return self._clients[key]


def _settings(place: Place) -> dict[str, Any]:
    """Return the arguments of the client that are the same for all places of a cloud."""
    common: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if place.protocol == "s3":
        # Compatible stores often have no names of hosts for buckets.
        style = {"s3": {"addressing_style": "path"}} if place.arguments.get("endpoint_url") else {}
        times = {"connect_timeout": _CONNECT_TIMEOUT_S, "read_timeout": _READ_TIMEOUT_S}
        # The client repeats requests itself.
        common["config_kwargs"] = times | style | {"retries": {"max_attempts": 0}}
    if place.protocol == "abfs":
        common |= {"connection_timeout": _CONNECT_TIMEOUT_S, "read_timeout": _READ_TIMEOUT_S}
    return common


def _list(client: Any, place: Place, inner: str, progress: Callable[[int], None]) -> list[StoredObject]:
    """Return the objects in a folder of the place. `progress` gets how many were listed: it says that work goes on."""
    folder = f"{place.root}/{inner}" if inner else place.root
    objects: list[StoredObject] = []
    for each in (_s3_objects if place.protocol == "s3" else _found_objects)(client, folder):
        objects.append(each)
        if len(objects) > MAX_OBJECT_COUNT:
            raise StoreError(f"the folder has more than {MAX_OBJECT_COUNT} objects")
        if len(objects) % _PAGE == 0:
            progress(len(objects))
    if not objects and not inner and not client.exists(place.root):
        raise FileNotFoundError(place.root)
    return objects


def _s3_objects(client: Any, folder: str) -> Iterator[StoredObject]:
    """Yield the objects in a folder, page by page. The client would keep all pages and take quadratic time."""
    bucket, _, path = folder.partition("/")
    prefix = f"{path}/" if path else ""
    arguments = {"Bucket": bucket, "Prefix": prefix}
    while True:
        page = client.call_s3("list_objects_v2", **arguments)
        for info in page.get("Contents", ()):
            name = info["Key"].removeprefix(prefix)
            if name.endswith("/"):
                yield StoredObject(name, 0, "")
            elif name:
                yield StoredObject(name, int(info["Size"]), _etag(info), _modified_ns(info))
        if not page.get("IsTruncated"):
            return
        arguments["ContinuationToken"] = page["NextContinuationToken"]


def _found_objects(client: Any, folder: str) -> Iterator[StoredObject]:
    """Yield the objects in a folder, as any client of fsspec finds them."""
    prefix = f"{folder.rstrip('/')}/"
    for path, info in client.find(folder, withdirs=True, detail=True).items():
        name = path.removeprefix(prefix)
        if name == path or not name:  # the folder itself
            continue
        if info["type"] == "directory":
            yield StoredObject(f"{name.rstrip('/')}/", 0, "")
        else:
            yield StoredObject(name, int(info.get("size") or 0), _etag(info), _modified_ns(info))


def _folders(client: Any, root: str) -> list[str]:
    found = client.ls(root, detail=True)
    names = {info["name"].rstrip("/").rpartition("/")[2] for info in found if info["type"] == "directory"}
    return sorted(names - {""})


def _read(client: Any, request: ReadObjects, progress: Callable[[int], None]) -> list[bytes | None]:
    """Return the contents of small objects; None for those that are gone meanwhile or that may not be read."""
    received = 0
    lock = threading.Lock()

    def read(name: str, byte_size: int) -> bytes | None:
        nonlocal received
        try:
            content = _part(client, f"{request.place.root}/{name}", 0, byte_size) if byte_size else b""
        except (FileNotFoundError, PermissionError):
            return None
        with lock:
            received += len(content)
            progress(received)
        return content

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(read, request.names, request.byte_sizes))


def _part(client: Any, path: str, begin: int, end: int) -> bytes:
    content: bytes = client.cat_file(path, start=begin, end=end)
    return content


def _etag(info: Mapping[str, Any]) -> str:
    """Return what changes with the content: the clouds have names of their own for it."""
    for name in ("ETag", "etag", "generation", "md5Hash"):
        if info.get(name):
            return str(info[name]).strip('"')
    return str(_modified_ns(info))


def _modified_ns(info: Mapping[str, Any]) -> int:
    for name in ("LastModified", "updated", "last_modified", "mtime"):
        value = info.get(name)
        if isinstance(value, str):
            value = datetime.datetime.fromisoformat(value)
        if isinstance(value, datetime.datetime):
            return int(value.timestamp() * 1e6) * 1000
    return 0


def _text(error: BaseException, place: Place) -> str:
    """Return what has gone wrong, without the secrets of the place."""
    kind = type(error).__name__
    text = " ".join(str(error).split())
    for secret in _secrets(place.arguments):
        text = text.replace(secret, "***")
    text = _SIGNATURE.sub(r"\1***", text)
    meaning = _MEANINGS.get(kind, "")
    detail = f"{kind}: {text}" if text else kind
    return f"{meaning} ({detail})"[:1000] if meaning else detail[:1000]


def _secrets(arguments: Mapping[str, Any]) -> list[str]:
    """Return what no text may have: the arguments of the client, and what it reads of the environment itself."""
    given = [arguments.get(name) for name in ("key", "secret", "token", "account_key")]
    given += [value for name, value in os.environ.items() if _SECRET_VARIABLE.fullmatch(name)]
    return sorted({str(value) for value in given if len(str(value or "")) > 3}, key=len, reverse=True)
