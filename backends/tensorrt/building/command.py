"""`naiad build-engine`: its options, what it prints, and the files that it writes.

It runs in a process of its own, because TensorRT may end it.

Where the files of a build go: into the folder of a model, as a model repository has it.

The config.pbtxt that goes with an engine. Pure.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer.exceptions import TyperException

from backends.tensorrt.building.engine import BarDisplay, NoDisplay, build_engine
from backends.tensorrt.building.settings import COMPATIBILITY, BuildSettings, byte_size, compatibility_level
from backends.tensorrt.configuration import autofill
from backends.tensorrt.library import BUILDERS, find_tensorrt
from kernel.errors import InvalidArgument, RequestCancelled, ServingError, Unavailable
from kernel.texts import install_command
from shm.cuda import CudaUnavailable, cuda

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import Config
    from backends.tensorrt.building.engine import PhaseDisplay
    from backends.tensorrt.signature import EngineSignature

#: As other commands that were ended by Ctrl-C.
_INTERRUPTED = 130

command = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Shapes = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME:1x3x224x224,...", show_default=False,
                 help="Shapes of inputs with variable dimensions. Each time the option is given makes a profile."),
]  # fmt: skip


@command.command()
def build_engine_file(
    onnx_file: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The ONNX file.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", show_default=False,
            help="The folder of the model, or a .plan file; default: a folder with the name of the ONNX file, here.",
        ),
    ] = None,
    min_shapes: _Shapes = None,
    opt_shapes: _Shapes = None,
    max_shapes: _Shapes = None,
    fp16: Annotated[bool, typer.Option("--fp16", help="Let TensorRT compute in FP16 (TensorRT 10).")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Let TensorRT compute in BF16 (TensorRT 10).")] = False,
    strongly_typed: Annotated[
        bool, typer.Option("--strongly-typed", help="Keep the ONNX model's datatypes; TensorRT 11 always does.")
    ] = False,
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="A plan that later versions of TensorRT can load.")
    ] = False,
    hardware_compatibility: Annotated[
        str,
        typer.Option("--hardware-compatibility", metavar="|".join(COMPATIBILITY), help="Other GPUs that can run it."),
    ] = "none",
    workspace: Annotated[
        str, typer.Option("--workspace", metavar="SIZE", help="The most scratch memory, such as 4G; 0: all.")
    ] = "0",
    timing_cache: Annotated[
        Path | None,
        typer.Option("--timing-cache", help="A file with times of earlier builds: it is read and written.",
                     show_default=False),
    ] = None,
    compute_capability: Annotated[
        str,
        typer.Option("--compute-capability", metavar="8.6", show_default=False,
                     help="Only TensorRT for RTX: the GPU to build for, which need not be there."),
    ] = "",
) -> None:  # fmt: skip
    """Build a TensorRT engine from an ONNX file, and the config.pbtxt that goes with it.

    The plan belongs to the version of TensorRT and the kind of GPU that it was built with.
    """
    files = output_files(output, onnx_file)
    settings = BuildSettings(
        onnx_file, files.plan, tuple(min_shapes or ()), tuple(opt_shapes or ()), tuple(max_shapes or ()),
        fp16, bf16, strongly_typed, version_compatible, compatibility_level(hardware_compatibility),
        byte_size(workspace), timing_cache, compute_capability,
    )  # fmt: skip
    raise typer.Exit(_build(settings, files))


def _build(settings: BuildSettings, files: OutputFiles) -> int:
    if not settings.onnx_file.is_file():
        raise InvalidArgument(f"there is no file '{settings.onnx_file}'")
    tensorrt = find_tensorrt(_print_log, BUILDERS)
    if not hasattr(tensorrt.module, "OnnxParser"):
        raise Unavailable(f"this TensorRT has no ONNX parser: {install_command('tensorrt')}")
    if not settings.compute_capability:
        _require_gpu()
    began = time.monotonic()
    with _shown() as display, _cancellable() as cancelled:
        built = build_engine(tensorrt, settings, display, cancelled)
    write_file(files.plan, built.plan)
    if settings.timing_cache is not None:
        write_file(settings.timing_cache, built.timing_cache)
    seconds = time.monotonic() - began
    typer.echo(
        f"{files.plan}: {len(built.plan) / 2**20:.1f} MiB, built in {seconds:.1f} s by TensorRT {tensorrt.version}"
    )
    _write_config(files, config_text(files.model, built.signature, files.plan.name))
    if settings.version_compatible:
        typer.echo("The server loads it with --backend-config=tensorrt,version-compatible=true")
    return 0


def _require_gpu() -> None:
    """Raise `Unavailable` without a GPU: TensorRT needs one, and would end the process."""
    try:
        cuda()
    except CudaUnavailable as error:
        raise Unavailable(
            f"an engine is built on the kind of GPU that runs it, and no GPU can be used: {error}"
        ) from None


def _write_config(files: OutputFiles, text: str) -> None:
    if files.config is None:
        typer.echo(f"A config.pbtxt for it:\n\n{text}", nl=False)
    elif files.config.exists():
        typer.echo(f"{files.config} is there already and stays as it is. It would be:\n\n{text}", nl=False)
    else:
        write_file(files.config, text.encode())
        typer.echo(str(files.config))


def _print_log(level: str, text: str) -> None:
    if level != "VERBOSE":
        typer.echo(f"{level.lower()}: {text}", err=True)


@contextlib.contextmanager
def _shown() -> Iterator[PhaseDisplay]:
    """Show bars on standard error during the block, if that is a terminal."""
    if not sys.stderr.isatty():
        yield NoDisplay()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield BarDisplay(progress)


@contextlib.contextmanager
def _cancellable() -> Iterator[_Cancellation]:
    """Let Ctrl-C end the build at its next step: an exception would be lost in TensorRT."""
    cancellation = _Cancellation()
    before = signal.signal(signal.SIGINT, lambda *_: cancellation.cancel())
    try:
        yield cancellation
    finally:
        signal.signal(signal.SIGINT, before)


class _Cancellation:
    """Whether the user has ended the build."""

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        """End it."""
        self._cancelled = True

    def __call__(self) -> bool:
        return self._cancelled


def run_command(arguments: list[str] | None = None) -> int:
    """Run the command, by default as in `sys.argv`; returns the exit code. An error is one text on standard error."""
    try:
        return command(arguments, standalone_mode=False, prog_name="naiad build-engine") or 0
    except RequestCancelled:
        return _INTERRUPTED
    except ServingError as error:
        typer.echo(f"error: {error.message}", err=True)
    except OSError as error:
        typer.echo(f"error: '{error.filename}' cannot be written: {error.strerror}", err=True)
    except TyperException as error:
        typer.echo(f"error: {error.format_message().rstrip('.')}. See 'naiad build-engine --help'", err=True)
    except typer.Abort:
        return _INTERRUPTED
    return 1


#: Suffixes of files; another output is the folder of a model.
_SUFFIXES = (".plan", ".engine", ".trt")


class OutputFiles(msgspec.Struct, frozen=True):
    """The files of a build."""

    plan: Path
    #: None if the plan does not lie in the version folder of a model.
    config: Path | None
    model: str


def output_files(output: Path | None, onnx_file: Path) -> OutputFiles:
    """Return where a build writes: a file, or `FOLDER/1/model.plan`; by default the folder has the ONNX file's name."""
    folder = output if output is not None else Path(onnx_file.stem)
    if folder.suffix not in _SUFFIXES:
        return OutputFiles(folder / "1" / "model.plan", folder / "config.pbtxt", folder.resolve().name)
    version = folder.resolve().parent
    if version.name.isdigit():
        return OutputFiles(folder, version.parent / "config.pbtxt", version.parent.name)
    return OutputFiles(folder, None, onnx_file.stem)


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that it never exists incomplete: a server may watch the folder. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def config_text(model: str, signature: EngineSignature, filename: str) -> str:
    """Return a complete configuration of a model with the engine in `filename`, as a person would write it.

    Raises `Unsupported` for tensors that no client can send.
    """
    profiles = [str(profile.index) for profile in signature.profiles]
    group: Config = {"kind": "KIND_GPU", "count": 1}
    if len(profiles) > 1:
        group["profile"] = profiles
    filled = autofill({"name": model, "instance_group": [group]}, signature)
    lines = [f"name: {_text(model)}", 'backend: "tensorrt"', f"max_batch_size: {filled['max_batch_size']}"]
    if filename != "model.plan":
        lines.append(f"default_model_filename: {_text(filename)}")
    for key in ("input", "output"):
        lines += [
            f"{key} [",
            *(f"  {_entry(entry)}," for entry in filled[key][:-1]),
            f"  {_entry(filled[key][-1])}",
            "]",
        ]
    lines.append("instance_group [ { kind: KIND_GPU count: 1" + _profiles(group) + " } ]")
    if "dynamic_batching" in filled:
        lines.append("dynamic_batching { }")
    return "\n".join(lines) + "\n"


def _entry(entry: dict[str, Any]) -> str:
    parts = [f"name: {_text(entry['name'])} data_type: {entry['data_type']} dims: {_numbers(entry['dims'])}"]
    if "reshape" in entry:
        parts.append(f"reshape {{ shape: {_numbers(entry['reshape']['shape'])} }}")
    if entry.get("is_shape_tensor"):
        parts.append("is_shape_tensor: true")
    return "{ " + " ".join(parts) + " }"


def _profiles(group: Config) -> str:
    names = group.get("profile", [])
    return f" profile: [ {', '.join(map(_text, names))} ]" if names else ""


def _numbers(values: list[int]) -> str:
    return f"[ {', '.join(map(str, values))} ]" if values else "[ ]"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
