"""The options of `naiad bench`, and its help. What it does is imported when it runs."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kernel.options import BadOption

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
    from kernel.command.bench.command import run_bench
    from kernel.command.bench.settings import BenchSettings, headers_of, levels_of, percents_of, shapes_of

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
