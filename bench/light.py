"""Light clients: wrk for HTTP/1.1 and h2load for gRPC, one thread each, which send one prepared request for ever.

perf_analyzer takes more processor time for a small request than the servers do, and hides what they differ in. These
two, written in C, take a few microseconds. Neither looks into a response: `bench/light_client.py` does before a load.
Both are Debian packages (`wrk`, `nghttp2-client`).
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec

from bench.rows import Figures

#: The program and its Debian package, by protocol.
PROGRAMS = {"http": ("wrk", "wrk"), "grpc": ("h2load", "nghttp2-client")}

#: The path of gRPC's unary call.
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"

#: A response may take this long before wrk counts it as an error.
_RESPONSE_TIMEOUT_S = 10
#: The part of the expected bytes that must have come. The last responses of a load may be counted before all of theirs.
_DATA_LIMIT = 0.99

#: wrk reads the body once, and formats one request that it sends for ever. `%s`: names of files and Lua strings.
_SCRIPT = """local file = assert(io.open("%s", "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
file:close()
"""
#: Added for pipelining: wrk sends the text of several requests at once, and counts their responses.
_PIPELINING = """init = function() several = string.rep(wrk.format(), %d) end
request = function() return several end
"""


class LightRequest(msgspec.Struct, frozen=True):
    """A POST request that never changes. Over gRPC the body is a message with its prefix of five bytes."""

    path: str
    body: bytes
    headers: dict[str, str] = {}


class LightLoad(msgspec.Struct, frozen=True):
    """A load of `seconds` on a port of loopback, with `connections` x `streams` requests always in flight.

    `streams` are of one connection, for gRPC only. `response_byte_size` is the smallest number of bytes of a
    response's body, or of its message with the prefix: h2load takes an error of gRPC, which has none, as a success.
    """

    protocol: str
    port: int
    request: LightRequest
    connections: int = 1
    streams: int = 1
    seconds: int = 1
    tls: bool = False
    keep_alive: bool = True
    response_byte_size: int = 0
    #: Requests that a connection sends before it waits for their responses, over HTTP only.
    pipelining: int = 1

    @property
    def url(self) -> str:
        return f"http{'s' * self.tls}://127.0.0.1:{self.port}{self.request.path}"


def missing(protocol: str) -> str:
    """Return why there is no client for a protocol on this machine, or nothing."""
    program, package = PROGRAMS[protocol]
    return "" if shutil.which(program) else f"{program} is not installed (apt-get install {package})"


def client_versions() -> str:
    """Return the versions of both programs in one line, without those that are absent."""
    found = []
    for program, _ in PROGRAMS.values():
        if shutil.which(program):
            # wrk prints its version with the exit code 1
            printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
            version = re.search(r"\d+\.[\d.]+", printed)
            found.append(f"{program} {version[0] if version else ''}".strip())
    return ", ".join(found)


def run_load(load: LightLoad) -> Figures | str:
    """Run a load and wait for its end. Returns the figures, or the reason why there are none.

    Responses without a status of 2xx and errors of sockets are failures of the whole load.
    """
    if reason := missing(load.protocol):
        return reason
    with tempfile.TemporaryDirectory(prefix="naiad-light-") as temporary:
        folder = Path(temporary)
        (folder / "body").write_bytes(load.request.body)
        command = _wrk(load, folder) if load.protocol == "http" else _h2load(load, folder)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=load.seconds + 2 * _RESPONSE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{command[0]} did not end"
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if load.protocol == "http":
            figures = parse_wrk(done.stdout + done.stderr)
        else:
            log = folder / "log"
            figures = parse_h2load(
                done.stdout + done.stderr, log.read_text() if log.exists() else "", load.response_byte_size
            )
    if isinstance(figures, str):
        return figures
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return msgspec.structs.replace(figures, client_cpu_s=spent_s)


def _wrk(load: LightLoad, folder: Path) -> list[str]:
    script = folder / "script.lua"
    script.write_text(_SCRIPT % (folder / "body") + (_PIPELINING % load.pipelining if load.pipelining > 1 else ""))
    headers = dict(load.request.headers)
    if not load.keep_alive:
        headers["Connection"] = "close"
    command = ["wrk", "--threads=1", f"--connections={load.connections}", f"--duration={load.seconds}s", "--latency",
               f"--timeout={_RESPONSE_TIMEOUT_S}s", f"--script={script}"]  # fmt: skip
    return [*command, *(f"--header={name}: {value}" for name, value in headers.items()), load.url]


def _h2load(load: LightLoad, folder: Path) -> list[str]:
    headers = {"content-type": "application/grpc", "te": "trailers", **load.request.headers}
    command = ["h2load", "--threads=1", f"--clients={load.connections}", f"--max-concurrent-streams={load.streams}",
               f"--duration={load.seconds}", f"--data={folder / 'body'}", f"--log-file={folder / 'log'}"]  # fmt: skip
    return [*command, *(f"--header={name}: {value}" for name, value in headers.items()), load.url]


_TO_US = {"us": 1.0, "ms": 1e3, "s": 1e6, "m": 60e6}


def parse_wrk(text: str) -> Figures | str:
    """Return the figures in wrk's report (`--latency`), or what went wrong."""
    if errors := re.search(r"Non-2xx or 3xx responses: (\d+)", text):
        return f"{errors[1]} responses were errors"
    if errors := re.search(r"Socket errors: (.+)", text):
        return f"errors of sockets: {errors[1].strip()}"
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    requests = re.search(r"(\d+) requests in ", text)
    latencies = {
        share: float(value) * _TO_US[unit] for share, value, unit in re.findall(r"(\d+)%\s+([\d.]+)(us|ms|s|m)\b", text)
    }
    if rate is None or requests is None or not {"50", "99"} <= latencies.keys():
        return _last_line(text, "wrk")
    if not int(requests[1]):
        return "no request was completed"
    return Figures(float(rate[1]), latencies["50"], latencies["99"], int(requests[1]))


def parse_h2load(text: str, log: str, response_byte_size: int = 0) -> Figures | str:
    """Return the figures in h2load's report and its log, or what went wrong.

    A line of the log has the time of a request, its status, and the microseconds that it took. `response_byte_size` is
    that of `LightLoad`.
    """
    finished = re.search(r"finished in .*?, ([\d.]+) req/s", text)
    counts = re.search(r"(\d+) done, (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", text)
    data = re.search(r"\((\d+)\) data", text)
    if finished is None or counts is None or data is None:
        return _last_line(text, "h2load")
    done, succeeded = int(counts[1]), int(counts[2])
    if not done:
        return "no request was completed"
    if succeeded < done:
        return f"{done - succeeded} of {done} requests were errors"
    if int(data[1]) < _DATA_LIMIT * done * response_byte_size:
        return f"responses have {int(data[1]) / done:.0f} bytes each and not {response_byte_size}: some were errors"
    latencies = sorted(int(line.rpartition("\t")[2]) for line in log.splitlines() if "\t200\t" in line)
    if not latencies:
        return "h2load has written no latencies"
    p50_us, p99_us = (latencies[len(latencies) * percent // 100] for percent in (50, 99))
    return Figures(float(finished[1]), p50_us, p99_us, done)


def _last_line(text: str, program: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else f"{program} printed nothing"
