"""The commands: `naiad run | models | infer | trace | replay` and others, also of `python -m kernel`.

`kernel/tools/main.py` runs `run` without this module.

`naiad build-engine`: starts the process that builds the engine. This process does not import TensorRT. `naiad agent`
becomes the agent of a host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from kernel.errors import BadOption
from kernel.machine import own_command
from kernel.options import DEMO_REPOSITORY
from kernel.tools.bench.options import bench, tune
from kernel.tools.run import run_server
from kernel.tools.traffic import rollout_cli
from kernel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Naiad, an inference server that speaks Triton's protocols and reads Triton's model repositories.",
    epilog="Try it: [bold]naiad run[/bold] serves demo models and prints what to try next.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"naiad {__version__}")
        raise typer.Exit


@cli.callback()
def naiad(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Hold the options that stand before a command. `cli` has the help of the program."""


#: typer does not parse the flags of `run`: `kernel.flags` does.
_FLAGS_OF_RUN = {"allow_extra_args": True, "ignore_unknown_options": True}


# Arguments of a container for Triton begin with the name of its program: they stay as they are.
@cli.command("tritonserver", hidden=True, add_help_option=False, context_settings=_FLAGS_OF_RUN)
@cli.command(add_help_option=False, context_settings=_FLAGS_OF_RUN)
def run(context: typer.Context) -> None:
    """Serve a model repository until Ctrl-C or SIGTERM. [dim]Flags: run --help[/dim]"""
    raise typer.Exit(run_server(context.args))


@cli.command()
def models(
    model_repository: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders of models, addresses in clouds (s3://...), the folder of one model, or files of models "
            "(.onnx, .py, .plan); default: the demo models.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only read the configurations; do not open the models' files.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the completed configurations.")] = False,
    show: Annotated[
        str, typer.Option("--show", metavar="NAME", help="Print the completed config.pbtxt of one model.")
    ] = "",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the log, and what models print, on standard error.")
    ] = False,
) -> None:
    """List the models of a repository, and check whether a server could load each of them, without loading it."""
    from kernel.tools.models import print_models
    from kernel.tools.run import folders_of
    from kernel.tools.target import local_folders

    cloud_folders = local_folders(model_repository or [str(DEMO_REPOSITORY)], configs_only=quick)
    with cloud_folders as given, folders_of(given) as paths:
        raise typer.Exit(print_models(paths, quick=quick, as_json=as_json, show=show, verbose=verbose))


@cli.command()
def init(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="NAME", help="The new model's folder, such as models/double. Its last part is the name."
        ),
    ],
    python: Annotated[bool, typer.Option("--python", help="A Python model; this is the default.")] = False,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", metavar="FILE", help="A model with a copy of this file.")
    ] = None,
    ensemble: Annotated[
        str,
        typer.Option("--ensemble", metavar="A,B,...", help="An ensemble of models in the same folder, in this order."),
    ] = "",
    template: Annotated[
        str,
        typer.Option(
            "--template",
            metavar="chat|function",
            help="A Python model that chats over OpenAI's API, or one that is a plain function.",
        ),
    ] = "",
) -> None:
    """Create the folder of a new model: a configuration, code or a file, a test, and explaining comments."""
    from kernel.tools.init import init_model

    if sum((python, onnx is not None, bool(ensemble), bool(template))) > 1:
        raise BadOption("give one of --python, --onnx, --ensemble and --template")
    if template not in ("", "chat", "function"):
        raise BadOption(f"there is no template '{template}': expected chat or function")
    names = [name.strip() for name in ensemble.split(",")] if ensemble else []
    raise typer.Exit(init_model(path, onnx=onnx, ensemble=names, template=template))


@cli.command()
def check(
    model_dir: Annotated[
        str, typer.Argument(help="A folder of models, an address in a cloud (s3://...), or the folder of one model.")
    ],
    requests: Annotated[int, typer.Option("--requests", min=1, max=1000, help="Number of different requests.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of random inputs and orders.")] = 0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds that a request may take; 0: no limit.")
    ] = 60,
    slow: Annotated[float, typer.Option("--slow", min=0, help="Report loads that take longer, in seconds.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the log, and what models print, on standard error.")
    ] = False,
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Instead, report what of a Triton repository needs a change to move here.")
    ] = False,
    start_command: Annotated[
        str,
        typer.Option(metavar="TEXT|FILE", help="With --migrate: Triton's start command, or a script or manifest."),
    ] = "",
    dashboards: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="With --migrate: dashboards and alert rules; files or folders, repeatable."),
    ] = None,
) -> None:
    """Load models and test them: outputs must not depend on batching or on the order of requests.

    The inputs come from the model's warm-up, or are random.
    """
    from kernel.tools.run import folders_of
    from kernel.tools.target import local_folders

    if (start_command or dashboards) and not migrate:
        raise BadOption("--start-command and --dashboards are for --migrate")
    with local_folders([model_dir]) as given, folders_of(given) as [path]:
        if migrate:
            from kernel.tools.migrate import check_migration

            raise typer.Exit(check_migration(path, start_command, dashboards or [], as_json=as_json, verbose=verbose))
        from kernel.tools.check import check_models
        from kernel.tools.trial import TrialSettings

        settings = TrialSettings(requests, seed, timeout)
        raise typer.Exit(check_models(path, settings, slow_load_s=slow, as_json=as_json, verbose=verbose))


# As `run`: the flags are a server's.
@cli.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def dev(
    context: typer.Context,
    model_dir: Annotated[Path, typer.Argument(help="The model's folder: it has config.pbtxt or versions.")],
) -> None:
    """Serve one model while you write it: it is reloaded when you save, breakpoint() stops in this terminal.

    [dim]Further flags are as for run.[/dim]
    """
    from kernel.tools.dev import serve_for_author

    raise typer.Exit(serve_for_author(model_dir, context.args))


@cli.command()
def infer(
    model: Annotated[str, typer.Argument(help="Name of the model, or NAME:VERSION.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", show_default=False,
                       help="Inputs: a JSON value such as 3, [1,2] or \"text\", a plain text, or a NumPy file, "
                       "NAME=@FILE.npy; NAME=@random for random values. Put brackets into quotes: 'NAME=[1,2]'."),
    ] = None,
    url: Annotated[
        str,
        typer.Option("--url", "-u", envvar="NAIAD_URL",
                     help="Address of the server's HTTP or gRPC port: HOST:PORT, a URL, or grpcs://HOST:PORT."),
    ] = "http://127.0.0.1:8000",
    classes: Annotated[
        int, typer.Option("--classes", "-c", min=0, help="Best classes to show; 0: only for outputs with labels.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: each response is one line of JSON, with all elements.")
    ] = False,
) -> None:  # fmt: skip
    """Call a running server and print the outputs, with labels if the model has labels.

    The responses of a decoupled model are printed as they come, one per line.
    """
    from kernel.tools.infer import infer_and_print

    infer_and_print(url, model, inputs or [], classes, as_json=as_json)


@cli.command()
def chat(
    model: Annotated[
        str, typer.Argument(help="Name of the model; not needed if the server has only one.", show_default=False)
    ] = "",
    url: Annotated[
        str,
        typer.Option("--url", "-u", envvar="OPENAI_BASE_URL",
                     help="Address of OpenAI's API: HOST:PORT, or a URL with or without /v1."),
    ] = "http://127.0.0.1:9000",
    system: Annotated[str, typer.Option("--system", "-s", metavar="TEXT", help="The system message.")] = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=0, help="The most tokens of a response; 0: the model's own end.")
    ] = 0,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", min=0, max=2, show_default=False,
                                   help="How far responses vary; default: the model's.")
    ] = None,
) -> None:  # fmt: skip
    """Talk to a model behind OpenAI's API, of this server or any other.

    Ctrl-C ends a response, Ctrl-D the conversation. An API key is taken from the environment variable OPENAI_API_KEY.
    Without a terminal, standard input is one message.
    """
    from kernel.tools.chat import chat_in_terminal

    given: dict[str, float] = {"max_tokens": max_tokens} if max_tokens else {}
    if temperature is not None:
        given["temperature"] = temperature
    key = os.environ.get("OPENAI_API_KEY", "")
    chat_in_terminal(url, model, system, key, given, stdin=sys.stdin, stdout=sys.stdout)


@cli.command()
def ready(
    url: Annotated[
        str,
        typer.Option("--url", "-u", show_default=False,
                     help="Address of the server's HTTP port; default: NAIAD_URL, or that of the flags in NAIAD_..."),
    ] = "",
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds until the server must respond.")] = 2,
) -> None:  # fmt: skip
    """Say whether a server is ready: the exit code is 0 or 1. For health checks of containers."""
    from kernel.tools.ready import print_ready

    raise typer.Exit(print_ready(url, timeout, os.environ))


@cli.command()
def traffic(
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    shares: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET=WEIGHT...", help="Weights of versions or labels, such as 3=95 4=5.",
                       show_default=False),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="LABEL=VERSION", help="Name a version; repeatable.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", help="header:NAME, parameter:NAME, request-id or sequence: equal keys, equal version."),
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option("--shadow", metavar="TARGET[=PERCENT]",
                     help="Send copies of requests to TARGET too, and compare the outputs; off ends it."),
    ] = None,
    worst: Annotated[
        Path | None,
        typer.Option("--worst", metavar="DIR", help="Write the requests that differ most, for naiad replay."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A traffic.toml that replaces the whole rule.")
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Use the traffic.toml of the repository again.")] = False,
    url: Annotated[str, typer.Option("--url", "-u", help="Address of the server's HTTP port.")] = "127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Show which versions of a model get which requests, or change it while the server runs."""
    from kernel.tools.traffic import show_traffic

    show_traffic(
        url,
        model,
        weights=shares or [],
        labels=label or [],
        key=key,
        shadow=shadow,
        file=file,
        worst=worst,
        reset=reset,
        as_json=as_json,
    )


@cli.command(name="shadow-of")
def shadow_of(
    old: Annotated[str, typer.Argument(metavar="URL", help="The HTTP or gRPC port of the server that clients use.")],
    server: Annotated[
        str, typer.Option("--server", help="The HTTP port of the Naiad server that gets copies: HOST:PORT.")
    ],
    listen: Annotated[
        str, typer.Option("--listen", help="Where clients connect in place of URL; port 0 takes a free one.")
    ] = "127.0.0.1:8100",
    percent: Annotated[
        float, typer.Option("--percent", min=0.001, max=100, help="How many of the inference requests are copied.")
    ] = 100.0,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1024, help="The most copies in flight.")
    ] = 4,
    waiting: Annotated[
        int, typer.Option("--waiting", min=1, max=100_000, help="The most copies that wait; others are dropped.")
    ] = 64,
    output: Annotated[
        list[str] | None,
        typer.Option("--output", metavar="NAME=RULE",
                     help="How an output is compared: close, exact, top1, order or ignore; repeatable."),
    ] = None,
    every: Annotated[float, typer.Option("--every", min=1, help="Seconds between two lines with the counts.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:  # fmt: skip
    """Stand in front of another server, and compare its responses with those of a Naiad server.

    Bytes are passed on unchanged, and clients get the responses of the other server. Of HTTP requests for inference a
    copy goes to --server. The exit code is 0 nothing differs, 1 something differs, 2 nothing was compared.
    """
    from kernel.tools.shadow_of import ProxySettings, shadow_server

    settings = ProxySettings(percent, concurrency, waiting)
    raise typer.Exit(shadow_server(old, server, listen, settings, output or [], every, as_json=as_json))


@cli.command()
def trace(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Trace files, of this server or of Triton.")],
    show_trace: Annotated[bool, typer.Option("--show-trace", "-t", help="Print each trace, with its tensors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture: a waterfall for each request.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a file for the viewer ui.perfetto.dev.")] = None,
) -> None:
    """Summarize trace files: where the time of requests went, by model and stage."""
    from kernel.tools.trace import print_traces

    raise typer.Exit(print_traces(files, as_json=as_json, each=show_trace, svg_file=svg, perfetto_file=perfetto))


# The process that builds parses the options.
@cli.command(
    name="build-engine",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def build_engine(context: typer.Context) -> None:
    """Build a TensorRT engine from an ONNX file, with its config.pbtxt. [dim]Options: build-engine --help[/dim]"""

    raise typer.Exit(start_build_engine(context.args))


# The agent parses the options.
@cli.command(
    name="agent",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def agent(context: typer.Context) -> None:
    """Start workers on this host for servers on other hosts. [dim]Options: agent --help[/dim]"""
    command = [*own_command("backends.hosts"), *context.args]
    os.execv(command[0], command)  # its signals and its exit code are this command's


@cli.command()
def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a recording (naiad run --record DIR).")],
    to: Annotated[str, typer.Option("--to", metavar="HOST:PORT", help="The HTTP or gRPC port of a server.")],
    speed: Annotated[float, typer.Option(min=0, help="2 sends twice as fast as recorded; 0: without pauses.")] = 1.0,
    model: Annotated[list[str] | None, typer.Option("--model", help="Only requests to this model; repeatable.")] = None,
    protocol: Annotated[
        str, typer.Option(metavar="auto|http|grpc", help="auto finds out what the port speaks.")
    ] = "auto",
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="The most requests in flight.")] = 64,
    rtol: Annotated[float, typer.Option(min=0, help="Allowed relative difference of numbers.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Allowed absolute difference of numbers.")] = 0.0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 300.0,
    longest_pause: Annotated[
        float, typer.Option(min=0, help="The most seconds between two requests, however long the recorded pause was.")
    ] = 60.0,
    show: Annotated[int, typer.Option(min=0, help="The most kinds of differences that are printed.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the single differences.")] = False,
) -> None:
    """Send recorded requests to a server, this one or Triton, and compare responses and latencies.

    It shows what a new version of a model, a new release or another server changes, with real requests:

    [bold]naiad replay DIR --to 127.0.0.1:8001 --speed 0[/bold]

    The exit code is 0 if no response differs, 1 if one differs or is missing, 2 if nothing could be found out.
    """
    from kernel.tools.replay import ReplaySettings, replay_recording
    from kernel.tools.replay_report import Tolerance

    if protocol not in ("auto", "http", "grpc"):
        raise BadOption(f"--protocol is auto, http or grpc, not '{protocol}'")
    settings = ReplaySettings(speed, concurrency, Tolerance(rtol, atol), timeout, longest_pause)
    raise typer.Exit(
        replay_recording(folder, to, settings, models=model or [], protocol=protocol, as_json=as_json, shown=show)
    )


cli.add_typer(rollout_cli, name="rollout")

cli.command()(bench)

cli.command()(tune)


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def run_command() -> int:
    """Run the command of `sys.argv`; returns the exit code. A wrong command line ends the process with one line."""
    try:
        return cli(standalone_mode=False, prog_name="naiad") or 0
    except TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "naiad"
        # Some of these texts end with a question: "Did you mean 'run'?."
        message = error.format_message().rstrip(".")
        if not message:  # the command line is empty, and the help is printed
            return 1
        sys.exit(f"error: {message}{'' if message.endswith('?') else '.'} See '{command} --help'")
    except typer.Abort:
        return 130


#: A module of the backend, with the options of the command.
_MODULE = "backends.tensorrt.building"


def start_build_engine(arguments: Sequence[str]) -> int:
    """Build an engine in a process of its own, and return its exit code. The options are that process's."""
    with _left_to_the_child():
        ended = subprocess.run([sys.executable, "-m", _MODULE, *arguments], check=False)
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        sys.stderr.write(f"error: the process that builds was ended by {name}: TensorRT or the driver has failed\n")
        return 1
    return ended.returncode


@contextlib.contextmanager
def _left_to_the_child() -> Iterator[None]:
    """Leave Ctrl-C to the child, which ends its build and returns."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # Ignored signals are inherited; the child sets a handler of its own while it builds.
        yield
    finally:
        signal.signal(signal.SIGINT, before)
