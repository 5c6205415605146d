"""What the server can be told at start, with defaults. `kernel/cli.py` gives every field its flag."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

#: The models that the package carries, served where no repository is given.
DEMO_REPOSITORY = Path(__file__).parent / "demo"


class BadOption(Exception):
    """The server cannot start as it was told to; the message is one line for the person who started it."""


class Listener(msgspec.Struct, frozen=True):
    """One front door: whether it is there, and where it listens."""

    allow: bool
    address: str
    port: int


class ServerOptions(msgspec.Struct, frozen=True):
    """Everything that the command line decides. Names and defaults are tritonserver's."""

    model_repositories: tuple[Path, ...]
    http: Listener = Listener(True, "0.0.0.0", 8000)
    grpc: Listener = Listener(True, "0.0.0.0", 8001)
    metrics: Listener = Listener(True, "0.0.0.0", 8002)
    server_id: str = "triton"
    model_control_mode: str = "none"
    load_models: tuple[str, ...] = ()
    exit_on_error: bool = True
    strict_readiness: bool = True
    exit_timeout_s: int = 30
    disable_auto_complete_config: bool = False
    http_max_input_size: int = 64 << 20
    allow_client_shm: str = "local"
    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_format: str = "default"
    event_loop: str = "uvloop"
    arena_byte_size: int = 1 << 34

    @property
    def demo(self) -> bool:
        """Whether the package's own models are served."""
        return self.model_repositories == (DEMO_REPOSITORY,)


def check_options(options: ServerOptions) -> None:
    """Raise `BadOption` where options contradict each other or the machine."""
    for folder in options.model_repositories:
        if not folder.is_dir():
            raise BadOption(
                f"model repository '{folder}' is not a folder. Give an existing one with --model-repository, or none "
                "at all to try the demo models"
            )
    if options.load_models and options.model_control_mode != "explicit":
        raise BadOption("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in options.load_models and len(options.load_models) > 1:
        raise BadOption("'--load-model=*' loads all models: it cannot be given together with names")
    taken: dict[tuple[str, int], str] = {}
    for title, listener in (("HTTP", options.http), ("GRPC", options.grpc), ("metrics", options.metrics)):
        if not listener.allow:
            continue
        if not 0 <= listener.port <= 65535:
            raise BadOption(f"{title} port {listener.port} is not between 0 and 65535")
        place = (listener.address, listener.port)
        if listener.port and place in taken:
            raise BadOption(
                f"The server cannot listen to {taken[place]} requests and {title} requests at the same address "
                f"and port {listener.address}:{listener.port}"
            )
        taken[place] = title


def default_arena_byte_size() -> int:
    """Return the largest power of two that is at most half of the machine's memory.

    An arena is a sparse file: this bounds what one model's tensors can take, and costs nothing.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1 << max(24, (memory // 2).bit_length() - 1)
