"""Objects in memory behind an HTTP port of this machine, as Amazon S3 shows them (REST API, path style)."""

from __future__ import annotations

import hashlib
import http.server
import socketserver
import threading
import urllib.parse
from email.utils import formatdate
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

#: Objects in one page of a listing; S3 has 1,000.
PAGE = 50

BUCKET = "models"


class FakeS3:
    """A store with one bucket, `BUCKET`. As a context manager it listens."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        #: The requests so far: method, key or prefix.
        self.requests: list[tuple[str, str]] = []
        #: What is done in place of a response: an HTTP status, or the name of a trouble in `_Handler`. By key; "" is
        #: for listings.
        self.troubles: dict[str, int | str] = {}
        #: Set to end stalled responses.
        self.released = threading.Event()
        #: Set when a trouble was met.
        self.met = threading.Event()

    def put(self, key: str, content: bytes | str) -> None:
        """Write an object."""
        self.objects[key] = content.encode() if isinstance(content, str) else content

    def put_folder(self, folder: Path, prefix: str) -> None:
        """Write all files of a folder."""
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def fetched(self) -> list[str]:
        """Return the keys whose content was asked for, sorted, and forget all requests."""
        found = sorted(key for method, key in self.requests if method == "GET" and key)
        self.requests.clear()
        return found

    @property
    def address(self) -> str:
        """The address of the bucket."""
        return f"s3://127.0.0.1:{self.port}/{BUCKET}"

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> FakeS3:
        store = self

        class Handler(_Handler):
            s3 = store

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed break their connections."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    s3: FakeS3

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._serve(head=True)

    def do_GET(self) -> None:
        self._serve(head=False)

    def _serve(self, *, head: bool) -> None:
        path, _, query = self.path.partition("?")
        bucket, _, key = urllib.parse.unquote(path.lstrip("/")).partition("/")
        arguments = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        self.s3.requests.append((self.command, key))
        if bucket != BUCKET:
            self._error(404, "NoSuchBucket", head=head)
        elif (trouble := self.s3.troubles.get(key)) is not None and not head:
            self.s3.met.set()
            self._misbehave(trouble, key)
        elif not key:
            self._send(200, b"" if head else self._listing(arguments), {"Content-Type": "application/xml"}, head=head)
        elif key not in self.s3.objects:
            self._error(404, "NoSuchKey", head=head)
        else:
            self._send_object(self.s3.objects[key], head=head)

    def _misbehave(self, trouble: int | str, key: str) -> None:
        content = self.s3.objects.get(key, b"")
        match trouble:
            case int():
                self._error(trouble, {403: "AccessDenied", 404: "NoSuchKey"}.get(trouble, "InternalError"), head=False)
            case "stall":  # the head, and then nothing
                self.send_response(200)
                self.send_header("Content-Length", str(len(content) + 1))
                self.end_headers()
                self.wfile.flush()
                self.s3.released.wait(60)
            case "cut":  # fewer bytes than announced, then the end
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            case "shorter":  # another size than in the listing
                self._send_object(content[:-1], head=False)
            case "html":
                self._send(200, b"<html>a proxy's page</html>", {"Content-Type": "text/html"}, head=False)
            case "redirect":
                self._send(301, b"", {"Location": "http://169.254.169.254/latest/meta-data/"}, head=False)
            case _:
                raise AssertionError(trouble)

    def _send_object(self, content: bytes, *, head: bool) -> None:
        headers = {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "Last-Modified": formatdate(1e9, usegmt=True)}
        begin, end, status = 0, len(content), 200
        if found := self.headers.get("Range"):
            first, _, last = found.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1, end) if last else end, 206
            if begin >= len(content):
                self._error(416, "InvalidRange", head=head)
                return
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self._send(status, content[begin:end], headers, head=head)

    def _listing(self, arguments: dict[str, str]) -> bytes:
        prefix, delimiter = arguments.get("prefix", ""), arguments.get("delimiter", "")
        after = arguments.get("continuation-token", "")
        names = sorted(key for key in self.s3.objects if key.startswith(prefix))
        shown: dict[str, str | None] = {}
        for key in names:
            rest = key[len(prefix) :]
            folder = prefix + rest.partition(delimiter)[0] + delimiter if delimiter and delimiter in rest else None
            shown[folder or key] = None if folder else key
        keys = [key for key in shown if key > after]
        page, more = keys[:PAGE], keys[PAGE:]
        parts = [
            f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
            if shown[key] is None
            else f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"{hashlib.md5(self.s3.objects[key]).hexdigest()}"</ETag>'
            f"<Size>{len(self.s3.objects[key])}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key in page
        ]
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{PAGE}</MaxKeys><IsTruncated>{'true' if more else 'false'}</IsTruncated>{token}"
            f"{''.join(parts)}</ListBucketResult>"
        ).encode()

    def _error(self, status: int, code: str, *, head: bool) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code} as ordered</Message></Error>".encode()
        self._send(status, body, {"Content-Type": "application/xml"}, head=head)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, head: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not head:
            self.wfile.write(body)
