"""The options of `naiad bench` and `naiad tune`, their help, and what their texts mean: loads, percentiles, shapes.

What the commands do is imported when they run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kernel.errors import BadOption

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The most loads of one run.
_MOST_LEVELS = 200

#: The most requests in flight.
MOST_CONNECTIONS = 16384

#: Connections of an open loop without `-c`.
OPEN_LOOP_CONNECTIONS = 256

#: Without -c and --rate.
DEFAULT_CONCURRENCY = "1:16"


class BenchLevel(msgspec.Struct, frozen=True):
    """One load: a closed loop with `connections` requests in flight, or an open loop with `rate` requests/s."""

    connections: int
    rate: float = 0.0


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A run of `naiad bench`."""

    model: str
    version: str
    url: str
    protocol: str
    levels: list[BenchLevel]
    distribution: str
    shared_memory: bool
    output_byte_size: int
    streaming: bool
    sequence_length: int
    input: str
    tensors: str
    shapes: dict[str, list[int]]
    batch: int
    headers: dict[str, str]
    duration_s: float
    warmup_s: float
    timeout_s: float
    percents: list[float]
    processes: int
    against: str
    as_csv: bool
    as_json: bool
    png: str


def levels_of(concurrency: str, rate: str) -> list[BenchLevel]:
    """Return the loads of `-c` and `--rate`. Raises `BadOption`."""
    if not rate:
        return [BenchLevel(int(each)) for each in span("--concurrency", concurrency or DEFAULT_CONCURRENCY, whole=True)]
    connections = span("--concurrency", concurrency, whole=True)[-1] if concurrency else OPEN_LOOP_CONNECTIONS
    return [BenchLevel(int(connections), each) for each in span("--rate", rate, whole=False)]


def span(flag: str, text: str, *, whole: bool) -> list[float]:
    """Return the numbers of N, A:B or A:B:STEP, or of several with commas.

    A:B doubles from A up to B, which is always the last. Raises `BadOption`.
    """
    found: list[float] = []
    for part in text.split(","):
        found += _span(flag, part.strip(), whole=whole)
    found = sorted(set(found))
    if len(found) > _MOST_LEVELS:
        raise BadOption(f"{flag} {text}: these are {len(found)} loads; the most are {_MOST_LEVELS}")
    if whole and found[-1] > MOST_CONNECTIONS:
        raise BadOption(f"{flag} {text}: the most are {MOST_CONNECTIONS}")
    return found


def _span(flag: str, text: str, *, whole: bool) -> list[float]:
    parts = text.split(":")
    try:
        numbers = [float(int(part)) if whole else float(part) for part in parts]
    except ValueError:
        numbers = []
    usable = len(numbers) in (1, 2, 3) and all(0 < number < 1e9 for number in numbers)
    if not usable or (len(numbers) > 1 and numbers[0] > numbers[1]):
        raise BadOption(f"{flag} takes N, FIRST:LAST (doubled each time) or FIRST:LAST:STEP, and not '{text}'")
    if len(numbers) == 1:
        return numbers
    first, last = numbers[:2]
    if len(numbers) == 2:
        found = []
        while first < last:
            found.append(first)
            first *= 2
        return [*found, last]
    step = numbers[2]
    count = int((last - first) / step + 1e-9)
    if count > _MOST_LEVELS:
        raise BadOption(f"{flag} {text}: these are {count + 1} loads; the most are {_MOST_LEVELS}")
    return [first + number * step for number in range(count + 1)]


def percents_of(text: str) -> list[float]:
    """Return the percentiles of `50,90,99`. Raises `BadOption`."""
    try:
        found = sorted({float(part.strip().removeprefix("p")) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 < each <= 100 for each in found):
        raise BadOption(f"--percentiles takes numbers above 0 and up to 100, as 50,90,99, and not '{text}'")
    return found


def shapes_of(texts: Sequence[str]) -> dict[str, list[int]]:
    """Return input name → its shape of `NAME:2,3`. Raises `BadOption`."""
    found = {}
    for text in texts:
        name, _, dims = text.rpartition(":")
        try:
            shape = [int(part) for part in dims.split(",")]
        except ValueError:
            shape = []
        if not name or not shape or min(shape) < 0:
            raise BadOption(f"--shape takes NAME:DIM,DIM,..., and not '{text}'")
        found[name] = shape
    return found


def headers_of(texts: Sequence[str]) -> dict[str, str]:
    """Return the headers of `Name: value`. Raises `BadOption`."""
    found = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not name.strip() or set("\r\n") & set(text):
            raise BadOption(f"--header takes 'NAME: VALUE', and not '{text}'")
        found[name.strip()] = value.strip()
    return found


_Model = Annotated[str, typer.Argument(help="Name of the model, or NAME:VERSION.")]

_Url = Annotated[
    str,
    typer.Option(
        "--url", "-u", envvar="NAIAD_URL", metavar="HOST:PORT",
        help="The HTTP or gRPC port of a server: of this one, of Triton, of any that speaks KServe v2.",
    ),
]  # fmt: skip

_Concurrency = Annotated[
    str,
    typer.Option(
        "--concurrency", "-c", metavar="N|A:B|A:B:STEP", show_default="1:16",
        help="Requests in flight: 1:64 doubles from 1 to 64, 1:64:8 adds 8. With --rate, the most.",
    ),
]  # fmt: skip

_Rate = Annotated[
    str,
    typer.Option(
        "--rate", metavar="N|A:B|A:B:STEP",
        help="Requests per second, sent when they are due and not when the server is ready for them.",
    ),
]  # fmt: skip

_Distribution = Annotated[
    str, typer.Option("--distribution", metavar="constant|poisson", help="The times between requests of --rate.")
]

_Protocol = Annotated[
    str,
    typer.Option("--protocol", "-i", metavar="auto|http|grpc", help="auto finds out what the port speaks."),
]

_SharedMemory = Annotated[
    str,
    typer.Option(
        "--shared-memory", metavar="none|system", help="system: tensors are in shared memory of this machine."
    ),
]

_OutputBytes = Annotated[
    int,
    typer.Option("--output-bytes", min=0, help="Shared memory for each output; 0: as the first response has it."),
]

_Streaming = Annotated[
    bool, typer.Option("--streaming", help="gRPC: on a stream per connection. HTTP: generate_stream.")
]

_Sequence = Annotated[bool, typer.Option("--sequence", help="Send sequences of requests, with ids, START and END.")]

_SequenceLength = Annotated[int, typer.Option("--sequence-length", min=1, help="Requests of a sequence.")]

_Input = Annotated[
    str,
    typer.Option(
        "--input", metavar="random|zero|FILE",
        help="FILE: JSON of perf_analyzer or of a request, .npy, .npz, or a folder with a file for each input.",
    ),
]  # fmt: skip

_Shape = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", metavar="NAME:2,3", help="Shape of an input whose dimensions may have any size; repeatable."
    ),
]

_BatchSize = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Rows of a request.")]

_Tensors = Annotated[
    str,
    typer.Option(
        "--tensors", metavar="auto|binary|json",
        help="How HTTP carries tensors; auto: binary where the server says that it can.",
    ),
]  # fmt: skip

_Header = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", metavar="'NAME: VALUE'", help="A header of each request; repeatable."),
]

_Duration = Annotated[float, typer.Option("--duration", "-d", min=0.1, help="Seconds that each load is measured.")]

_Warmup = Annotated[float, typer.Option("--warmup", min=0, help="Seconds of each load before that.")]

_Timeout = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds until a request has failed.")]

_Percentiles = Annotated[str, typer.Option("--percentiles", help="Which percentiles of the latency to print.")]

_Processes = Annotated[
    int,
    typer.Option("--processes", min=0, max=64, help="Processes that send; 0: one for two processors, at most four."),
]

_Against = Annotated[
    str,
    typer.Option(
        "--against", metavar="HOST:PORT|FILE",
        help="Another server, measured in turn, or the file of an earlier run (--json).",
    ),
]  # fmt: skip

_Csv = Annotated[bool, typer.Option("--csv", help="Print CSV; columns that perf_analyzer has too have its names.")]

_Json = Annotated[bool, typer.Option("--json", help="Print JSON, which --against reads.")]

_Png = Annotated[str, typer.Option("--png", metavar="FILE", help="Draw latency against throughput; needs matplotlib.")]


def bench(
    model: _Model,
    url: _Url = "127.0.0.1:8000",
    concurrency: _Concurrency = "",
    rate: _Rate = "",
    distribution: _Distribution = "constant",
    protocol: _Protocol = "auto",
    shared_memory: _SharedMemory = "none",
    output_bytes: _OutputBytes = 0,
    streaming: _Streaming = False,
    sequence: _Sequence = False,
    sequence_length: _SequenceLength = 20,
    input_values: _Input = "random",
    shape: _Shape = None,
    batch_size: _BatchSize = 1,
    tensors: _Tensors = "auto",
    header: _Header = None,
    duration: _Duration = 5.0,
    warmup: _Warmup = 1.0,
    timeout: _Timeout = 30.0,
    percentiles: _Percentiles = "50,90,95,99",
    processes: _Processes = 0,
    against: _Against = "",
    as_csv: _Csv = False,
    as_json: _Json = False,
    png: _Png = "",
) -> None:
    """Measure a model under load: latency, throughput, and where the time goes in the server.

    \b
    naiad bench resnet -c 1:64               1, 2, 4 ... 64 requests in flight
    naiad bench resnet --rate 100:1000:100   at fixed rates, as users send them
    naiad bench llm --streaming -u :8001     time to the first response, gaps
    naiad bench resnet --against HOST:8000   two servers, load by load
    naiad bench resnet --json > before.json  and later: --against before.json

    Ctrl-C ends it and prints what was measured so far.

    The exit code is 0, 1 if requests failed, 2 if nothing could be measured.
    """
    from kernel.tools.bench.command import run_bench

    check_choice("--protocol", protocol, ("auto", "http", "grpc"))
    check_choice("--distribution", distribution, ("constant", "poisson"))
    check_choice("--shared-memory", shared_memory, ("none", "system"))
    check_choice("--tensors", tensors, ("auto", "binary", "json"))
    name, _, version = model.partition(":")
    settings = BenchSettings(
        model=name, version=version, url=url, protocol=protocol.replace("auto", ""),
        levels=levels_of(concurrency, rate), distribution=distribution, shared_memory=shared_memory == "system",
        output_byte_size=output_bytes, streaming=streaming, sequence_length=sequence_length if sequence else 0,
        input=input_values, tensors=tensors, shapes=shapes_of(shape or []), batch=batch_size,
        headers=headers_of(header or []), duration_s=duration, warmup_s=warmup, timeout_s=timeout,
        percents=percents_of(percentiles), processes=processes or default_processes(), against=against,
        as_csv=as_csv, as_json=as_json, png=png,
    )  # fmt: skip
    raise typer.Exit(run_bench(settings))


def default_processes() -> int:
    """Return how many processes send: the server on this machine needs processors too."""
    return min(4, max(1, len(os.sched_getaffinity(0)) // 2))


def check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `BadOption` unless `value` is one of `choices`."""
    if value not in choices:
        raise BadOption(f"{flag} is {', '.join(choices[:-1])} or {choices[-1]}, and not '{value}'")


_TunedModel = Annotated[str, typer.Argument(help="Name of the model.")]

_TunedUrl = Annotated[
    str,
    typer.Option(
        "--url", "-u", envvar="NAIAD_URL", metavar="HOST:PORT",
        help="The HTTP or gRPC port of a server with --model-control-mode=explicit.",
    ),
]  # fmt: skip

_Latency = Annotated[float, typer.Option("--latency", min=0, help="Milliseconds that the percentile may have; 0: any.")]

_Percentile = Annotated[float, typer.Option("--percentile", min=1, max=100, help="Which percentile of the latency.")]

_TunedConcurrency = Annotated[
    str, typer.Option("--concurrency", "-c", metavar="N|A:B|A:B:STEP", help="Requests in flight that are tried.")
]

_Instances = Annotated[
    str, typer.Option("--instances", metavar="A:B|N,N", help="Instances of each instance group that are tried.")
]

_Batches = Annotated[
    str,
    typer.Option(
        "--batch-sizes", metavar="A:B|N,N", show_default="the one of the model and larger ones",
        help="max_batch_size that are tried.",
    ),
]  # fmt: skip

_Delays = Annotated[str, typer.Option("--delays", metavar="N,N", help="Queue delays that are tried, in microseconds.")]

_TunedInput = Annotated[
    str, typer.Option("--input", metavar="random|zero|FILE", help="The values of inputs, as in naiad bench.")
]

_TunedShape = Annotated[
    list[str] | None, typer.Option("--shape", metavar="NAME:2,3", help="Shape of an input, as in naiad bench.")
]

_TunedHeader = Annotated[
    list[str] | None, typer.Option("--header", "-H", metavar="'NAME: VALUE'", help="A header, as in naiad bench.")
]

_Write = Annotated[
    str,
    typer.Option("--write", metavar="FOLDER", help="The model's folder, to whose config.pbtxt the best is written."),
]

_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Write without asking.")]

_TunedJson = Annotated[bool, typer.Option("--json", help="Print JSON, with every load.")]

_TunedPng = Annotated[str, typer.Option("--png", metavar="FILE", help="Draw all configurations; needs matplotlib.")]


def tune(
    model: _TunedModel,
    url: _TunedUrl = "127.0.0.1:8000",
    latency: _Latency = 0.0,
    percentile: _Percentile = 99.0,
    concurrency: _TunedConcurrency = "1:64",
    instances: _Instances = "1:4",
    batch_sizes: _Batches = "",
    delays: _Delays = "0,100,500,2000",
    input_values: _TunedInput = "random",
    shape: _TunedShape = None,
    header: _TunedHeader = None,
    duration: _Duration = 2.0,
    write: _Write = "",
    yes: _Yes = False,
    as_json: _TunedJson = False,
    png: _TunedPng = "",
) -> None:
    """Find the instances, batch size and queue delay with which a model takes the most requests.

    \b
    naiad tune resnet --latency 20                      p99 of at most 20 ms
    naiad tune resnet --latency 20 --write models/resnet

    The model is loaded with each configuration, while requests of others go on.

    At the end, and after Ctrl-C, it has its old one unless you write the new one.
    """
    from kernel.tools.bench.results import percent_name
    from kernel.tools.bench.tune_candidates import LatencyGoal
    from kernel.tools.bench.tuning import TuneSettings, run_tune

    if ":" in model:
        raise BadOption("naiad tune changes the configuration of all versions: give the name of the model alone")
    try:
        waits = sorted({int(each) for each in delays.split(",")})
    except ValueError:
        raise BadOption(f"--delays takes microseconds as 0,100,500, and not '{delays}'") from None
    if min(waits) < 0:
        raise BadOption(f"--delays takes microseconds as 0,100,500, and not '{delays}'")
    bench = BenchSettings(
        model=model, version="", url=url, protocol="", levels=levels_of(concurrency, ""), distribution="constant",
        shared_memory=False, output_byte_size=0, streaming=False, sequence_length=0, input=input_values,
        tensors="auto", shapes=shapes_of(shape or []), batch=1, headers=headers_of(header or []),
        duration_s=duration, warmup_s=0.3, timeout_s=30.0,
        percents=percents_of(f"50,{percentile:g}"), processes=default_processes(), against="", as_csv=False,
        as_json=as_json, png=png,
    )  # fmt: skip
    settings = TuneSettings(
        goal=LatencyGoal(latency, percent_name(percentile)),
        instances=[int(each) for each in span("--instances", instances, whole=True)],
        batch_sizes=[int(each) for each in span("--batch-sizes", batch_sizes, whole=True)] if batch_sizes else [],
        delays_us=waits, write=write, yes=yes, as_json=as_json, png=png,
    )  # fmt: skip
    raise typer.Exit(run_tune(bench, settings))
