"""The command line: `python -m kernel run | models | infer`. Flags have tritonserver's names and meanings."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from kernel import __version__
from kernel.command.flags.help import print_help
from kernel.command.flags.read import read_flags
from kernel.options import DEMO_REPOSITORY, BadOption, check_options

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
    if "--help" in context.args:
        print_help()
        return
    options, notes = read_flags(context.args, os.environ)
    check_options(options)
    from kernel.app import serve  # imported late: other commands and wrong flags do not need the server

    raise typer.Exit(serve(options, notes))


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
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run a command. A wrong command line prints one line and exits with code 1."""
    try:
        sys.exit(cli(standalone_mode=False) or 0)
    except TyperException as error:
        sys.exit(f"error: {error.format_message()}. See 'python -m kernel --help'")
    except BadOption as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
