"""The process that reads clouds for the kernel: `python -m kernel.repository.clouds.process`.

It reads requests from standard input and writes responses to standard output. It ends with its input, which ends with
the kernel, and after a minute without a request: the clients of the stores need 50 to 80 MiB.

`Stores` carries out the requests, by fsspec, and blocks. All stores that fsspec has a client for would do; the errors
of the three clouds are known here. Objects are received in blocks, several at a time, each straight into its file: the
clients of the stores would hold hundreds of MiB of a large object, and would say nothing until all of it is there.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import logging
import os
import re
import select
import struct
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import failing_as
from kernel.repository.clouds.messages import (
    IDLE_S,
    MAX_ITEM_COUNT,
    MAX_OBJECT_COUNT,
    Download,
    Failed,
    ListFolders,
    ListObjects,
    Part,
    ReadObjects,
    Received,
    Request,
    Result,
    StoredObject,
)
from kernel.texts import install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import BinaryIO

    from kernel.repository.clouds.messages import Place, Response

#: How many blocks are received at the same time, of one object or of several.
_BLOCKS_AT_ONCE = 8

#: Bytes. The first blocks are short, so that a slow store shows progress before it is given up.
_MIN_BYTE_SIZE, FIRST_BYTE_SIZE, MAX_BYTE_SIZE = 64 << 10, 128 << 10, 4 << 20

#: Seconds in which a block should arrive: not many more requests than needed, and progress all the time.
_FAST_S, _SLOW_S = 0.5, 4.0


class StoreError(Exception):
    """A request has failed. The message is for operators, and has no secrets."""


class BlockSize:
    """The length of the next block, as the last ones were fast or slow. Pure."""

    def __init__(self) -> None:
        self.byte_size = FIRST_BYTE_SIZE

    def arrived(self, byte_size: int, took_s: float) -> None:
        """A block has arrived. Only those of the present length say something about it."""
        if byte_size != self.byte_size:
            return
        if took_s < _FAST_S:
            self.byte_size = min(byte_size * 2, MAX_BYTE_SIZE)
        elif took_s > _SLOW_S:
            self.byte_size = max(byte_size // 2, _MIN_BYTE_SIZE)


class _File:
    """A file that is being received."""

    def __init__(self, name: str, incoming: str, path: str, byte_size: int) -> None:
        self.name = name
        self._incoming = incoming
        self._path = path
        self._missing = byte_size
        self._lock = threading.Lock()
        with _writing():
            self._fd = os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        if not byte_size:
            self._finish()

    def write(self, offset: int, content: bytes) -> None:
        """Write a block; with the last one the file is at its place."""
        with _writing():
            rest = memoryview(content)
            while rest:
                rest = rest[os.pwrite(self._fd, rest, offset + len(content) - len(rest)) :]
        with self._lock:
            self._missing -= len(content)
            is_whole = not self._missing
        if is_whole:
            self._finish()

    def _finish(self) -> None:
        with _writing():
            os.close(self._fd)
            os.rename(self._incoming, self._path)


class _Block(msgspec.Struct):
    file: _File
    begin: int
    end: int


def download(request: Download, read: Callable[[str, int, int], bytes], progress: Callable[[int], None]) -> None:
    """Receive the files of a request. `read` returns the bytes of an object from a position to another.

    `progress` gets how many bytes have arrived. Raises `StoreError`, and what `read` raises; then blocks may still
    arrive.
    """
    size, lock = BlockSize(), threading.Lock()
    blocks = _blocks(request, size)
    received, failed = 0, False

    def work() -> None:
        nonlocal received, failed
        try:
            while True:
                with lock:
                    block = None if failed else next(blocks, None)
                if block is None:
                    return
                begun_s = time.monotonic()
                content = read(block.file.name, block.begin, block.end)
                if len(content) != block.end - block.begin:
                    raise StoreError(
                        f"'{block.file.name}' is not as long as in the listing: {len(content)} bytes came from byte "
                        f"{block.begin} on, {block.end - block.begin} were asked for"
                    )
                block.file.write(block.begin, content)
                with lock:
                    size.arrived(len(content), time.monotonic() - begun_s)
                    received += len(content)
                    progress(received)
        except BaseException:
            failed = True
            raise

    pool = ThreadPoolExecutor(_BLOCKS_AT_ONCE)
    done, _ = wait([pool.submit(work) for _ in range(_BLOCKS_AT_ONCE)], return_when=FIRST_EXCEPTION)
    for each in done:
        each.result()


def _blocks(request: Download, size: BlockSize) -> Iterator[_Block]:
    """Yield the blocks of all files, one file after the other. Empty files have none, and are there."""
    for index, (name, path) in enumerate(request.files.items()):
        byte_size, begin = request.byte_sizes[name], 0
        file = _File(name, os.path.join(request.incoming, str(index)), path, byte_size)
        while begin < byte_size:
            end = min(begin + size.byte_size, byte_size)
            yield _Block(file, begin, end)
            begin = end


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Say that this machine has failed, not the store."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"the copy cannot be written: {error.strerror}") from error


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
PAGE_LENGTH = 1000

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
        root = request.place.root
        with failing_as(lambda error: StoreError(error_text(error, request.place)), passes=StoreError):
            client = self._client(request.place)
            client.invalidate_cache()
            match request:
                case ListObjects(folder=folder):
                    return _list(client, request.place, folder, progress)
                case ListFolders():
                    return _folders(client, root)
                case ReadObjects():
                    return _read_objects(client, request, progress)
                case Download():
                    return download(request, lambda name, *limits: _part(client, f"{root}/{name}", *limits), progress)

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
            self._clients[key] = kind(**place.arguments, **_settings(place))
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
        if len(objects) % PAGE_LENGTH == 0:
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


def _read_objects(client: Any, request: ReadObjects, progress: Callable[[int], None]) -> list[bytes | None]:
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


def error_text(error: BaseException, place: Place) -> str:
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


#: Seconds between two messages about progress.
_PROGRESS_S = 0.5

_LENGTH = struct.Struct("!I")


class _Responses:
    """Writes messages; progress comes from several threads."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._next_progress_s = 0.0

    def send(self, message: Response) -> None:
        content = msgspec.msgpack.encode(message)
        if not isinstance(message, Received):
            self._next_progress_s = 0.0  # of the next request
        with self._lock:
            self._stream.write(_LENGTH.pack(len(content)) + content)
            self._stream.flush()

    def progress(self, count: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + _PROGRESS_S
            self.send(Received(count))


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer requests until the input ends, or for `IDLE_S` seconds none comes."""
    stores, output = Stores(), _Responses(target)
    decoder = msgspec.msgpack.Decoder(Request)
    while select.select([source], [], [], IDLE_S)[0]:
        head = _read(source, _LENGTH.size)
        if len(head) < _LENGTH.size:
            return
        request = decoder.decode(_read(source, _LENGTH.unpack(head)[0]))
        try:
            value = stores.answer(request, output.progress)
            while isinstance(value, list) and len(value) > MAX_ITEM_COUNT:
                output.send(Part(_encoded(value[:MAX_ITEM_COUNT])))
                value = value[MAX_ITEM_COUNT:]
            output.send(Result(_encoded(value)))
        except StoreError as error:
            output.send(Failed(str(error)))


def _encoded(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def _read(source: BinaryIO, byte_size: int) -> bytes:
    """Return `byte_size` bytes; fewer at the end of the input."""
    parts, missing = [], byte_size
    while missing and (part := source.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _end_with_input(fd: int) -> None:
    """End this process when the kernel has ended, also in the middle of a request. Blocks until then."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main() -> None:
    """Serve the kernel. What libraries print goes to standard error. What they log may have secrets, and is lost."""
    logging.disable()
    threading.Thread(target=_end_with_input, args=(0,), daemon=True).start()
    target = os.dup(1)
    os.dup2(2, 1)
    # Without a buffer: `select` would not see what is in one.
    with open(0, "rb", buffering=0) as source, open(target, "wb") as stream:
        serve(source, stream)


if __name__ == "__main__":
    main()
