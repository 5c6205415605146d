"""`python -m bench COMMAND`: rows, curve, growth, heavy, density, peers, trees, start, restart, tracing, micro..."""

from __future__ import annotations

import math
import random
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import against as against_commit
from bench import compare, curve, density, growth, machine, start, store
from bench.checkout import UnknownCommit
from bench.density import Density
from bench.density import print_table as print_density
from bench.heavy import command as heavy
from bench.overload import print_overload
from bench.server import ServerFailed
from bench.triton import NotAvailable
from bench.verdicts import RUNS, print_table

cli = typer.Typer(
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Measure the server, and if available a real Triton beside it. Without a command: [bold]rows[/bold].\n\n"
        "Triton and NVIDIA's perf_analyzer are fetched once into ~/.cache/naiad-bench (Debian or Ubuntu). Use a machine"
        " that does nothing else: figures are medians of rounds that alternate between the servers, but other programs"
        " still disturb them. An interrupted run stops its servers and writes nothing."
    ),
    epilog=(
        "Begin with [bold]python -m bench curve --quick[/bold] (2 minutes, pictures in build/bench/). The pictures of"
        " README.md and docs/performance.md are made by [bold]python -m bench curve && python -m bench growth[/bold]."
    ),
)

Only = Annotated[str, typer.Option(help="only rows whose name contains this: 'small', 'grpc', 'c=8'")]
OnlyOf = Annotated[str, typer.Option(help="only rows whose name contains one of these: 'small', 'light json,onnx_cpp'")]
Full = Annotated[bool, typer.Option("--full", help="with --against: all rounds of each row, also of settled ones")]
Keep = Annotated[
    bool, typer.Option("--keep", help="keep our figures in bench/results/kept.json, which later runs compare with")
]
Rounds = Annotated[
    int | None,
    typer.Option(min=1, help="rounds per row and server; figures are medians", show_default="3, with --against 9"),
]
OnlyKind = Annotated[
    str, typer.Option(help="only kinds of models whose name contains this: python, onnx, torch, sklearn")
]
OnlyPeers = Annotated[str, typer.Option(help="only these peers, or parts of their names: naiad,mosec,ray")]
HeavyRounds = Annotated[int, typer.Option(min=1, help="rounds per row and server; waits are medians")]
TritonInAll = Annotated[bool, typer.Option(help="measure Triton in all rows, and not in twelve: an hour")]
Seconds = Annotated[
    float | None,
    typer.Option(
        min=0.1, help="length of a window of perf_analyzer; a round has three", show_default="1.0, with --against 0.4"
    ),
]
Against = Annotated[
    str, typer.Option(metavar="COMMIT", help="compare this tree with a commit of ours instead of with Triton")
]
Output = Annotated[Path | None, typer.Option(help="write figures and settings to this JSON file", dir_okay=False)]
WithoutTriton = Annotated[bool, typer.Option("--without-triton", help="measure only our server")]
Quick = Annotated[
    bool, typer.Option("--quick", help="a first look: one cold round, fewer points, files in build/bench/")
]


@cli.command()
def verdicts(
    runs: Annotated[int, typer.Option(min=1, help="simulated rollouts for each row")] = RUNS,
    only: Only = "",
) -> None:
    """How often the verdicts of rollouts are wrong, and when they come: the table of docs/traffic.md (10 minutes)."""
    print_table(runs, only)


@cli.command()
def overload() -> None:
    """Ten times what a model can do: responses in time, refusals, health, memory and recovery (1 minute)."""
    print_overload()


@cli.command()
def rows(
    only: OnlyOf = "",
    rounds: Rounds = None,
    seconds: Seconds = None,
    output: Output = None,
    without_triton: WithoutTriton = False,
    against: Against = "",
    full: Full = False,
    keep: Keep = False,
) -> None:
    """Load in 104 rows: requests/s, p99, CPU time of a request, and the ratios. 25 minutes, with --against 15 to 20.

    Names that begin with `light` or `onnx_cpp` are loaded by wrk and h2load (Debian: wrk, nghttp2-client), the others
    by perf_analyzer. With --against both commits are measured in paired rounds, and a row ends when no round to come
    could change its verdict. The exit code is 1 where a rate is below 0.95 of the one before with confidence.
    """
    _warn_if_busy()
    if against:
        plan = against_commit.PairedPlan(rounds or 9, seconds or 0.4, full, output, keep)
        raise typer.Exit(against_commit.run(against, only, plan, random.Random(0)))  # equal orders in every run
    plan_beside_triton = compare.RowsPlan(rounds or 3, seconds or 1.0, not without_triton, output, keep)
    raise typer.Exit(compare.run(only, plan_beside_triton))


@cli.command("curve")
def curve_command(quick: Quick = False, without_triton: WithoutTriton = False) -> None:
    """Latency and throughput by tensor size, 1 KiB to 64 MiB, and by transport, with a picture. 8 minutes."""
    _warn_if_busy()
    measured = curve.measure(quick=quick, with_triton=not without_triton)
    curve.print_table(measured)
    _publish("curve", measured, quick=quick)


@cli.command("growth")
def growth_command(quick: Quick = False, without_triton: WithoutTriton = False) -> None:
    """Cost of a request with 1 to 256 connections, 1 to 64 models, 1 to 4 instances, with a picture. 9 minutes."""
    _warn_if_busy()
    measured = growth.measure(quick=quick, with_triton=not without_triton)
    growth.print_table(measured)
    _publish("growth", measured, quick=quick)


@cli.command("heavy")
def heavy_command(
    only: Only = "", rounds: HeavyRounds = 1, without_triton: WithoutTriton = False, triton_in_all: TritonInAll = False
) -> None:
    """What one heavy request does to other clients and to the kernel's memory: 252 rows. A quarter of an hour.

    The exit code is 1 where a healthy client waits too long, the kernel grows too much, or a status is not the
    expected one. With --only the figures are written to build/bench/.
    """
    _warn_if_busy()
    raise typer.Exit(heavy.run(only, rounds, with_triton=not without_triton, in_all_rows=triton_in_all))


@cli.command("density")
def density_command(quick: Quick = False, without_triton: WithoutTriton = False, only: OnlyKind = "") -> None:
    """Time until ready, memory and rate with 1 to 200 models, restarts of a worker, with a picture. 15 minutes."""
    _warn_if_busy()
    measured = density.measure(quick=quick, with_triton=not without_triton, only=only)
    print_density(measured)
    _publish("density", measured, quick=quick or bool(only))


@cli.command("peers")
def peers_command(
    only: OnlyPeers = "",
    rounds: Annotated[int, typer.Option(min=1, help="rounds over all peers; figures are medians")] = 3,
    seconds: Annotated[int, typer.Option(min=1, help="length of a load")] = 2,
    workers: Annotated[
        int | None, typer.Option(min=1, help="workers of each server", show_default="1, and as many as cores")
    ] = None,
    quick: Quick = False,
    add: Annotated[bool, typer.Option("--add", help="add the rounds to the rounds of the last run")] = False,
    connections: Annotated[
        bool, typer.Option(help="measure our own server with 1 to 256 connections, without keep-alive, pipelined")
    ] = True,
    minutes: Annotated[
        float | None, typer.Option(min=1, help="fewer rounds if these would take longer", show_default="no limit")
    ] = None,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="install the newest versions first")] = False,
    install_only: Annotated[bool, typer.Option("--install-only", help="install all, and measure nothing")] = False,
) -> None:
    """Our server beside mosec, KServe, LitServe, BentoML, MLServer, Ray Serve, FastAPI and Triton, with a picture.

    Each is installed from the package index into ~/.cache/naiad-bench/peers (2 GB), served as its documentation
    recommends, and loaded by wrk, h2load and perf_analyzer. 27 minutes, with --minutes 20 at most 20; before the first
    run 15 to 30 more, to install all, which --install-only does alone.
    """
    from bench.peers import command  # as below

    if install_only:
        raise typer.Exit(0 if command.install_only(only, upgrade=upgrade) else 1)
    _warn_if_busy()
    path = store.stem("peers", quick=quick).with_suffix(".json")
    measured = command.run(only, 1 if quick else rounds, workers, path if add else None, connections=connections,
                           seconds=1 if quick else seconds, upgrade=upgrade,
                           limit_s=math.inf if minutes is None else minutes * 60)  # fmt: skip
    _publish("peers", measured, quick=quick)


@cli.command("trees")
def trees_command(
    rounds: Annotated[int, typer.Option(min=1, help="rounds over all servers; figures are medians")] = 3,
    seconds: Annotated[int, typer.Option(min=1, help="length of a load")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="workers of each server")] = 1,
    quick: Quick = False,
) -> None:
    """An XGBoost model of 200 trees, a row in JSON: ours beside MLServer, KServe's SDK and Triton. 3 minutes.

    The first run installs them into ~/.cache/naiad-bench (1.5 GB). Each response is compared with xgboost's own.
    """
    from bench.peers import command  # as below

    _warn_if_busy()
    measured = command.run_trees(1 if quick else rounds, workers, seconds=1 if quick else seconds)
    path = store.stem("trees", quick=quick).with_suffix(".json")
    store.write_json(path, measured)
    print(f"wrote {path}")


@cli.command("start")
def start_command() -> None:
    """Time from the command until every port listens, and memory in use. 10 seconds."""
    start.run()


@cli.command("restart")
def restart_command() -> None:
    """Time from the kill of a worker until the next one responds, forked and spawned. 20 seconds."""
    start.measure_restarts()


@cli.command("loads")
def loads_command() -> None:
    """Small Python models that are loaded and unloaded, one and eight at a time: rate and CPU time. 30 seconds."""
    start.measure_loads()


@cli.command("tracing")
def tracing_command() -> None:
    """What traces cost the kernel: CPU time of a small request without, with one in 1000, with all. 2 minutes.

    The exit code is 1 where one in 1000 costs more than 1 %, or all more than 15 %.
    """
    from bench import tracing  # as below

    raise typer.Exit(tracing.run())


@cli.command("recording")
def recording_command() -> None:
    """What the flight recorder costs the kernel: CPU time of a small request, not recorded and recorded. 2 minutes.

    The exit code is 1 where recording each request costs more than 20 %, or one in 1000 more than 3 %.
    """
    from bench import recording  # as below

    raise typer.Exit(recording.run())


@cli.command("shadow")
def shadow_command(
    rounds: Annotated[int, typer.Option(min=1, help="paired rounds of each comparison; ratios are medians")] = 9,
    only: Annotated[str, typer.Option(help="only comparisons whose title contains this: 'computes', 'rule'")] = "",
) -> None:
    """What a shadow of all requests, and a traffic rule, cost clients: rate and p99 against those without. 4 minutes.

    The exit code is 1 where a shadow of a model that waits leaves less than 0.97 of the rate or makes more than 1.25 of
    the p99, one of a model that computes, with clients at half of what it can, 0.95 and 1.5, or a rule 0.95.
    """
    from bench import shadow  # as below

    raise typer.Exit(shadow.run(rounds, only))


@cli.command("scale")
def scale_command(
    doors: Annotated[str, typer.Option(help="numbers of front doors: 0,1,2")] = "0,1,2",
    rounds: Annotated[int, typer.Option(min=1, help="rounds; figures are medians")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="length of a load")] = 3,
    only: Only = "",
) -> None:
    """Processor time of a request over HTTP, with and without processes for front doors (wrk, c=32). 4 minutes."""
    from bench import scale  # as above

    try:
        counts = [int(each) for each in doors.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--doors has numbers separated by commas, not '{doors}'") from None
    scale.run(counts, rounds, seconds, only)


@cli.command("remote")
def remote_command(
    rounds: Annotated[int, typer.Option(min=1, help="rounds; figures are medians")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="length of a load")] = 2,
    only: Annotated[str, typer.Option(help="only tensors whose size contains this: '64 B', 'MiB'")] = "",
) -> None:
    """A worker on another host (an agent on loopback) against a local one, 64 B to 16 MiB (wrk). 5 minutes."""
    from bench import remote  # as above

    remote.run(rounds, seconds, only)


@cli.command("page")
def page_command() -> None:
    """What an open page costs the kernel: CPU time with 40 models, idle and under load. 2 minutes.

    The exit code is 1 where it costs more than 1 % of a processor.
    """
    from bench import page  # as below

    raise typer.Exit(page.run())


@cli.command("micro")
def micro_command() -> None:
    """The parts of a request, one by one, in one process: messages, framing, blocks, checks. 20 seconds."""
    from bench import micro  # imports the server into this process, which would disturb every other measurement

    micro.run()


@cli.command()
def draw(quick: Quick = False) -> None:
    """Draw the pictures again from the JSON files of the last runs, without a measurement."""
    from bench.peers.measurement import PeerResults  # imports NumPy and the protocol's messages

    kinds: dict[str, Any] = {"curve": curve.Curve, "growth": growth.Growth, "density": Density, "peers": PeerResults}
    for name, kind in kinds.items():
        path = store.stem(name, quick=quick).with_suffix(".json")
        if path.exists():
            _draw(name, store.read_json(path, kind), quick=quick)


def _publish(name: str, measured: Any, *, quick: bool) -> None:
    path = store.stem(name, quick=quick).with_suffix(".json")
    store.write_json(path, measured)
    print(f"wrote {path}")
    _draw(name, measured, quick=quick)


def _draw(name: str, measured: Any, *, quick: bool) -> None:
    # matplotlib takes half a second to import, and only the pictures need it
    from bench.pictures import draw_curve, draw_density, draw_growth, draw_peers, save

    drawers: dict[str, Any] = {
        "curve": draw_curve, "growth": draw_growth, "density": draw_density, "peers": draw_peers,
    }  # fmt: skip
    figure = drawers[name](measured)
    for path in save(figure, store.stem(name, quick=quick)):
        print(f"wrote {path}")


def _warn_if_busy() -> None:
    load = machine.this_machine().load
    if load > machine.BUSY:
        print(f"this machine is busy ({load} processors in use), so figures will be too bad", file=sys.stderr)


def _terminated(number: int, _: object) -> None:
    """End the program by an exception, so that `with` blocks stop the servers."""
    sys.exit(128 + number)


def main() -> None:
    """Run a command, or `rows` if there is none."""
    signal.signal(signal.SIGTERM, _terminated)
    arguments = sys.argv[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "--help"):
        arguments = ["rows", *arguments]
    try:
        cli(args=arguments, prog_name="python -m bench")
    except (NotAvailable, UnknownCommit, ServerFailed) as error:
        sys.exit(f"cannot measure: {error}")


if __name__ == "__main__":
    main()
