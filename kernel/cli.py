"""The command line: `python -m kernel run | models | infer`. Flags have tritonserver's names and meanings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from kernel import __version__
from kernel.options import (
    DEMO_REPOSITORY,
    BadOption,
    HttpOptions,
    Listener,
    LogOptions,
    RepositoryOptions,
    ServerOptions,
    check_options,
    default_arena_byte_size,
)

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Naiad, an inference server that speaks Triton's protocols and reads Triton's model repositories.",
    epilog="Try it: [bold]python -m kernel run[/bold] serves demo models and says what to type next.",
)


class Switch:
    """A flag with a value, as tritonserver has them: `--allow-http=false`."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __str__(self) -> str:
        return "true" if self.on else "false"


def parse_switch(text: str | Switch) -> Switch:
    """Return the switch that `text` means, in the words that tritonserver takes."""
    word = str(text).lower()
    if word in ("true", "on", "1"):
        return Switch(True)
    if word in ("false", "off", "0"):
        return Switch(False)
    raise typer.BadParameter(f"'{text}' is neither true nor false")


def _one_of(*words: str) -> Callable[[str], str]:
    """Return a parser that accepts `words` in upper or lower case."""

    def parse(text: str) -> str:
        if text.lower() not in {word.lower() for word in words}:
            raise typer.BadParameter(f"'{text}' is none of {', '.join(words)}")
        return next(word for word in words if word.lower() == text.lower())

    return parse


ON = Switch(True)
_SWITCH = {"parser": parse_switch, "metavar": "true|false"}
_REPOSITORY, _HTTP, _GRPC, _METRICS, _LOG, _SERVER = "Models", "HTTP", "gRPC", "Metrics", "Log", "Server"


@cli.command()
def run(
    model_repository: Annotated[
        list[Path] | None,
        typer.Option("--model-repository", "--model-store", help="Folder of models; can be given more than once. "
                     "Without it, demo models are served.", rich_help_panel=_REPOSITORY, show_default=False),
    ] = None,
    model_control_mode: Annotated[
        str, typer.Option(parser=_one_of("none", "explicit"), metavar="none|explicit", rich_help_panel=_REPOSITORY,
                          help="none: load every model at start. explicit: only those of --load-model."),
    ] = "none",
    load_model: Annotated[
        list[str] | None, typer.Option(help="A model to load at start in explicit mode; '*' for all.",
                                       rich_help_panel=_REPOSITORY, show_default=False),
    ] = None,
    exit_on_error: Annotated[
        Switch, typer.Option(**_SWITCH, help="End with code 1 where a model fails to load at start.",
                             rich_help_panel=_REPOSITORY),
    ] = ON,
    disable_auto_complete_config: Annotated[
        bool, typer.Option("--disable-auto-complete-config", help="Take model configurations exactly as written.",
                           rich_help_panel=_REPOSITORY),
    ] = False,
    allow_http: Annotated[Switch, typer.Option(**_SWITCH, help="Serve HTTP.", rich_help_panel=_HTTP)] = ON,
    http_address: Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=_HTTP)] = "0.0.0.0",
    http_port: Annotated[int, typer.Option(help="Port; 0 for any free one.", rich_help_panel=_HTTP)] = 8000,
    http_max_input_size: Annotated[
        int, typer.Option(help="Largest JSON, raw or inflated request body in bytes.", min=1, rich_help_panel=_HTTP)
    ] = 64 << 20,
    allow_grpc: Annotated[Switch, typer.Option(**_SWITCH, help="Serve gRPC.", rich_help_panel=_GRPC)] = ON,
    grpc_address: Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=_GRPC)] = "0.0.0.0",
    grpc_port: Annotated[int, typer.Option(help="Port; 0 for any free one.", rich_help_panel=_GRPC)] = 8001,
    allow_metrics: Annotated[Switch, typer.Option(**_SWITCH, help="Serve /metrics.", rich_help_panel=_METRICS)] = ON,
    metrics_address: Annotated[
        str, typer.Option(help="Address to listen at; --http-address where not given.", rich_help_panel=_METRICS,
                          show_default=False)
    ] = "",
    metrics_port: Annotated[int, typer.Option(help="Port; 0 for any free one.", rich_help_panel=_METRICS)] = 8002,
    strict_readiness: Annotated[
        Switch, typer.Option(**_SWITCH, help="/v2/health/ready is true only while every model is ready.",
                             rich_help_panel=_SERVER),
    ] = ON,
    allow_client_shm: Annotated[
        str, typer.Option(parser=_one_of("local", "true", "false"), metavar="local|true|false", rich_help_panel=_SERVER,
                          help="Who may register shared memory; local: clients on this machine."),
    ] = "local",
    exit_timeout_secs: Annotated[
        int, typer.Option(help="Seconds that requests in flight get after Ctrl-C or SIGTERM.", min=0,
                          rich_help_panel=_SERVER),
    ] = 30,
    id: Annotated[str, typer.Option(help="Name of the server in its metadata.", rich_help_panel=_SERVER)] = "triton",
    event_loop: Annotated[
        str, typer.Option(parser=_one_of("uvloop", "asyncio"), metavar="uvloop|asyncio", help="Event loop.",
                          rich_help_panel=_SERVER),
    ] = "uvloop",
    log_verbose: Annotated[int, typer.Option(help="Verbose log level, 0 for none.", min=0, rich_help_panel=_LOG)] = 0,
    log_info: Annotated[Switch, typer.Option(**_SWITCH, help="Log information.", rich_help_panel=_LOG)] = ON,
    log_warning: Annotated[Switch, typer.Option(**_SWITCH, help="Log warnings.", rich_help_panel=_LOG)] = ON,
    log_error: Annotated[Switch, typer.Option(**_SWITCH, help="Log errors.", rich_help_panel=_LOG)] = ON,
    log_format: Annotated[
        str, typer.Option(parser=_one_of("default", "ISO8601"), metavar="default|ISO8601", help="Form of log lines.",
                          rich_help_panel=_LOG),
    ] = "default",
) -> None:  # fmt: skip
    """Serve a model repository until Ctrl-C or SIGTERM."""
    from kernel.app import serve  # the other commands do not need the server

    options = ServerOptions(
        repository=RepositoryOptions(
            paths=tuple(model_repository or (DEMO_REPOSITORY,)),
            control_mode=model_control_mode,
            load_models=tuple(load_model or ()),
            exit_on_error=exit_on_error.on,
            auto_complete_config=not disable_auto_complete_config,
        ),
        http_listener=Listener(allow_http.on, http_address, http_port),
        grpc_listener=Listener(allow_grpc.on, grpc_address, grpc_port),
        metrics_listener=Listener(allow_metrics.on, metrics_address or http_address, metrics_port),
        http=HttpOptions(max_input_size=http_max_input_size),
        log=LogOptions(log_verbose, log_info.on, log_warning.on, log_error.on, log_format),
        server_id=id,
        strict_readiness=strict_readiness.on,
        exit_timeout_s=exit_timeout_secs,
        allow_client_shm=allow_client_shm,
        event_loop=event_loop,
        arena_byte_size=default_arena_byte_size(),
    )
    check_options(options)
    raise typer.Exit(serve(options))


@cli.command()
def models(
    model_repository: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of models; the demo models where none is given.", show_default=False),
    ] = None,
) -> None:
    """List the models of a repository and say for each whether its configuration is valid."""
    from kernel.listing import print_models

    raise typer.Exit(print_models(tuple(model_repository or (DEMO_REPOSITORY,))))


@cli.command()
def infer(
    model: Annotated[str, typer.Argument(help="Name of the model, or NAME:VERSION.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE|NAME=@FILE.npy]...", show_default=False,
                       help="Inputs: a JSON value such as 3, [1,2] or \"text\", a plain text, or a NumPy file."),
    ] = None,
    url: Annotated[str, typer.Option("--url", "-u", help="Where the server listens for HTTP.")] = "http://127.0.0.1:8000",
    classes: Annotated[
        int, typer.Option("--classes", "-c", min=0, help="Show this many best classes of each output.")
    ] = 0,
) -> None:  # fmt: skip
    """Call a running server and print the outputs, with labels where the model has them."""
    from kernel.client import infer_and_print

    raise typer.Exit(infer_and_print(url, model, inputs or [], classes))


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run a command; what is wrong with it is said in one line, with code 1."""
    try:
        sys.exit(cli(standalone_mode=False) or 0)
    except TyperException as error:
        sys.exit(f"error: {error.format_message()}. See 'python -m kernel --help'")
    except BadOption as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
