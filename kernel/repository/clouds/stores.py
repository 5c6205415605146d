"""What the process that reads clouds does: requests to the clients of the stores, by fsspec. Blocks.

All stores that fsspec has a client for would do; the errors of the three clouds are known here.
"""

from __future__ import annotations

import datetime
import importlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.repository.clouds.messages import (
    MAX_OBJECT_COUNT,
    Download,
    ListFolders,
    ListObjects,
    ReadObjects,
    StoredObject,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kernel.repository.clouds.messages import Place, Request

#: Protocol → module with the client, its class, and the extra of the package that brings it.
_CLIENTS = {
    "s3": ("s3fs", "S3FileSystem", "s3"),
    "gs": ("gcsfs", "GCSFileSystem", "gs"),
    "abfs": ("adlfs", "AzureBlobFileSystem", "azure"),
}

#: How many files are received at the same time. The clients divide large ones.
_AT_ONCE = 8

#: In seconds. The kernel ends this process if nothing arrives for longer.
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 10, 30

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


class StoreError(Exception):
    """A request has failed. The message is for operators, and has no secrets."""


class Stores:
    """The clients of the stores. One is made for each place, and kept."""

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
                    return _list(client, root, folder)
                case ListFolders():
                    return _folders(client, root)
                case ReadObjects(names=names):
                    with ThreadPoolExecutor(_AT_ONCE) as pool:
                        paths = [f"{root}/{name}" for name in names]
                        return list(pool.map(client.cat_file, paths))
                case Download():
                    return _download(client, request, progress)
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
                raise StoreError(
                    f"the package {module} is missing ({error}): pip install 'naiad-server[{extra}]'"
                ) from None
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


def _list(client: Any, root: str, inner: str) -> list[StoredObject]:
    folder = f"{root}/{inner}" if inner else root
    found = client.find(folder, withdirs=True, detail=True)
    if len(found) > MAX_OBJECT_COUNT:
        raise StoreError(f"the folder has {len(found)} objects, at most {MAX_OBJECT_COUNT} are allowed")
    prefix = f"{folder.rstrip('/')}/"
    objects: list[StoredObject] = []
    for path, info in found.items():
        name = path.removeprefix(prefix)
        if name == path or not name:  # the folder itself
            continue
        if info["type"] == "directory":
            objects.append(StoredObject(f"{name.rstrip('/')}/", 0, ""))
        else:
            objects.append(StoredObject(name, int(info.get("size") or 0), _etag(info), _modified_ns(info)))
    if not objects and not inner and not client.exists(root):
        raise FileNotFoundError(root)
    return objects


def _folders(client: Any, root: str) -> list[str]:
    found = client.ls(root, detail=True)
    names = {info["name"].rstrip("/").rpartition("/")[2] for info in found if info["type"] == "directory"}
    return sorted(names - {""})


def _download(client: Any, request: Download, progress: Callable[[int], None]) -> None:
    from fsspec.callbacks import Callback

    received, lock = [0], threading.Lock()

    class Counted(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            with lock:
                received[0] += inc
                progress(received[0])

    def get(index: int, name: str, path: str) -> None:
        incoming = os.path.join(request.incoming, str(index))
        client.get_file(f"{request.place.root}/{name}", incoming, callback=Counted())
        byte_size, expected = os.path.getsize(incoming), request.byte_sizes[name]
        if byte_size != expected:
            raise StoreError(f"'{name}' has {byte_size} bytes, the listing says {expected}")
        os.rename(incoming, path)

    # The kernel ends this process after a failure: nobody waits for the other files.
    pool = ThreadPoolExecutor(_AT_ONCE)
    for each in [pool.submit(get, index, *item) for index, item in enumerate(request.files.items())]:
        each.result()


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
    meaning = _MEANINGS.get(kind, "")
    detail = f"{kind}: {text}" if text else kind
    return f"{meaning} ({detail})"[:1000] if meaning else detail[:1000]


def _secrets(arguments: Mapping[str, Any]) -> list[str]:
    names = ("key", "secret", "token", "account_key")
    return [str(arguments[name]) for name in names if len(str(arguments.get(name, ""))) > 3]
