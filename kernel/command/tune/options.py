"""The options of `naiad tune`, and its help. What it does is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from kernel.command.bench.options import default_processes
from kernel.options import BadOption

_Model = Annotated[str, typer.Argument(help="Name of the model.")]
_Url = Annotated[
    str,
    typer.Option(
        "--url", "-u", envvar="NAIAD_URL", metavar="HOST:PORT",
        help="The HTTP or gRPC port of a server with --model-control-mode=explicit.",
    ),
]  # fmt: skip
_Latency = Annotated[float, typer.Option("--latency", min=0, help="Milliseconds that the percentile may have; 0: any.")]
_Percentile = Annotated[float, typer.Option("--percentile", min=1, max=100, help="Which percentile of the latency.")]
_Concurrency = Annotated[
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
_Input = Annotated[
    str, typer.Option("--input", metavar="random|zero|FILE", help="The values of inputs, as in naiad bench.")
]
_Shape = Annotated[
    list[str] | None, typer.Option("--shape", metavar="NAME:2,3", help="Shape of an input, as in naiad bench.")
]
_Header = Annotated[
    list[str] | None, typer.Option("--header", "-H", metavar="'NAME: VALUE'", help="A header, as in naiad bench.")
]
_Duration = Annotated[float, typer.Option("--duration", "-d", min=0.1, help="Seconds that each load is measured.")]
_Write = Annotated[
    str,
    typer.Option("--write", metavar="FOLDER", help="The model's folder, to whose config.pbtxt the best is written."),
]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Write without asking.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, with every load.")]
_Png = Annotated[str, typer.Option("--png", metavar="FILE", help="Draw all configurations; needs matplotlib.")]


def tune(
    model: _Model,
    url: _Url = "127.0.0.1:8000",
    latency: _Latency = 0.0,
    percentile: _Percentile = 99.0,
    concurrency: _Concurrency = "1:64",
    instances: _Instances = "1:4",
    batch_sizes: _Batches = "",
    delays: _Delays = "0,100,500,2000",
    input_values: _Input = "random",
    shape: _Shape = None,
    header: _Header = None,
    duration: _Duration = 2.0,
    write: _Write = "",
    yes: _Yes = False,
    as_json: _Json = False,
    png: _Png = "",
) -> None:
    """Find the instances, batch size and queue delay with which a model takes the most requests.

    \b
    naiad tune resnet --latency 20                      p99 of at most 20 ms
    naiad tune resnet --latency 20 --write models/resnet

    The model is loaded with each configuration, while requests of others go on.

    At the end, and after Ctrl-C, it has its old one unless you write the new one.
    """
    from kernel.command.bench.report.results import percent_name
    from kernel.command.bench.settings import BenchSettings, headers_of, levels_of, percents_of, shapes_of, span
    from kernel.command.tune.command import TuneSettings, run_tune
    from kernel.command.tune.report import LatencyGoal

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
