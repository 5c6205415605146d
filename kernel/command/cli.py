"""The commands: `python -m kernel run | models | infer | trace`. `main.py` runs `run` without this module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from kernel import __version__
from kernel.command.run import run_server
from kernel.options import DEMO_REPOSITORY

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Naiad, an inference server that speaks Triton's protocols and reads Triton's model repositories.",
    epilog="Try it: [bold]python -m kernel run[/bold] serves demo models and prints what to try next.",
)


# typer does not parse the flags of `run`: `kernel.command.flags` does.
@cli.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(context: typer.Context) -> None:
    """Serve a model repository until Ctrl-C or SIGTERM. [dim]Flags: run --help[/dim]"""
    raise typer.Exit(run_server(context.args))


@cli.command()
def models(
    model_repository: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of models; the demo models if there is none.", show_default=False),
    ] = None,
) -> None:
    """List the models of a repository, and whether their configurations are valid."""
    from kernel.command.models import print_models

    raise typer.Exit(print_models(tuple(model_repository or (DEMO_REPOSITORY,))))


@cli.command()
def infer(
    model: Annotated[str, typer.Argument(help="Name of the model, or NAME:VERSION.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE|NAME=@FILE.npy]...", show_default=False,
                       help="Inputs: a JSON value such as 3, [1,2] or \"text\", a plain text, or a NumPy file."),
    ] = None,
    url: Annotated[str, typer.Option("--url", "-u", help="Address of the server's HTTP port: HOST:PORT or a URL.")] = "http://127.0.0.1:8000",
    classes: Annotated[
        int, typer.Option("--classes", "-c", min=0, help="Number of best classes to show of each output.")
    ] = 0,
) -> None:  # fmt: skip
    """Call a running server and print the outputs, with labels if the model has labels."""
    from kernel.command.infer import infer_and_print

    raise typer.Exit(infer_and_print(url, model, inputs or [], classes))


@cli.command()
def trace(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Trace files, of this server or of Triton.")],
    show_trace: Annotated[bool, typer.Option("--show-trace", "-t", help="Print each trace, with its tensors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture: a waterfall for each request.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a file for the viewer ui.perfetto.dev.")] = None,
) -> None:
    """Summarize trace files: where the time of requests went, by model and stage."""
    from kernel.command.traces.command import print_traces

    raise typer.Exit(print_traces(files, as_json=as_json, each=show_trace, svg_file=svg, perfetto_file=perfetto))


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def run_command() -> int:
    """Run the command of `sys.argv`; returns the exit code. A wrong command line ends the process with one line."""
    try:
        return cli(standalone_mode=False) or 0
    except TyperException as error:
        sys.exit(f"error: {error.format_message()}. See 'python -m kernel --help'")
    except typer.Abort:
        return 130
