"""The command `naiad agent`: its options, and its process."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer
from typer.exceptions import TyperException

from backends.environments.messages import EnvironmentFailed
from backends.hosts.agent import AgentSettings, HostAgent
from backends.hosts.encryption import Encryption
from backends.hosts.files import ModelCopies, default_cache_folder
from backends.hosts.messages import read_token
from kernel.errors import BadOption, ServingError
from kernel.flags.flag import BadValue, parse_host_port
from kernel.machine import raise_descriptor_limit
from kernel.options import TlsOptions, check_together, is_loopback
from kernel.repository.execution_environment import EnvironmentSettings

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@cli.command(context_settings={"help_option_names": ["-h", "--help"]})
def agent(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where servers reach the agent; port 0 for any.")],
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the token that servers must have; needed unless HOST is a loopback address."),
    ] = None,
    cert_file: Annotated[
        Path | None, typer.Option(help="The agent's certificate (PEM). Servers then need TLS and a certificate.")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="The private key (PEM) of --cert-file, without passphrase.")
    ] = None,
    root_cert_file: Annotated[
        Path | None, typer.Option(help="The authority (PEM) that has signed the certificates of servers.")
    ] = None,
    host_name: Annotated[str, typer.Option(help="The name of this host for servers.")] = socket.gethostname(),
    max_workers: Annotated[int, typer.Option(min=0, help="The most workers at the same time; 0 for no limit.")] = 0,
    worker_lease_secs: Annotated[
        float, typer.Option(min=0, max=86400, help="Seconds that workers may live without their server.")
    ] = 60,
    cache_directory: Annotated[
        Path | None, typer.Option(help="Copies of models; by default a folder in the user's cache folder.")
    ] = None,
    cache_byte_size: Annotated[int, typer.Option(min=1 << 20, help="The most bytes of all copies.")] = 20 << 30,
    environment_cache_directory: Annotated[
        Path | None, typer.Option(help="Environments of models; by default a folder in the user's cache folder.")
    ] = None,
    environment_cache_byte_size: Annotated[
        int, typer.Option(min=1 << 20, help="The most bytes of all environments.")
    ] = 20 << 30,
    environment_timeout_secs: Annotated[
        float, typer.Option(min=0, help="Seconds that an environment may take to be made; 0 for no limit.")
    ] = 900,
) -> None:
    """Start workers on this host for servers on other hosts (naiad run --launcher=agent --agents=HOST:PORT).

    Everyone with the token may run programs here. Without --cert-file nothing is encrypted: use a private network.
    """
    try:
        address = parse_host_port(listen, 0)
    except BadValue as error:
        raise BadOption(f"--listen: {error}") from None
    if token_file is None and not is_loopback(address[0]):
        raise BadOption(f"--listen={listen} is an address for other hosts: it needs --token-file")
    token = b"" if token_file is None else read_token(token_file)
    encryption = _encryption(cert_file, key_file, root_cert_file)
    folder = cache_directory or default_cache_folder()
    environments = EnvironmentSettings(
        "" if environment_cache_directory is None else str(environment_cache_directory.absolute()),
        environment_cache_byte_size,
        environment_timeout_secs,
    )
    copies = ModelCopies(folder.absolute(), cache_byte_size)
    settings = AgentSettings(host_name, token, max_workers, worker_lease_secs)
    raise_descriptor_limit()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.create_server(address, family=family, backlog=128) as listener:
        agent = functools.partial(HostAgent, settings, copies, environments, encryption)
        anyio.run(_serve, settings.host, agent, listener, backend_options={"use_uvloop": True})


def _encryption(certificate: Path | None, key: Path | None, authority: Path | None) -> Encryption | None:
    """Return what the files say. Raises `BadOption`."""
    check_together({"--cert-file": certificate, "--key-file": key, "--root-cert-file": authority})
    if certificate is None or key is None:
        return None
    return Encryption(TlsOptions(certificate, key, authority, mutual=True), listens=True)


async def _serve(host: str, make: Callable[[], HostAgent], listener: socket.socket) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    logger.info("the agent of host '%s' listens at %s:%d", host, *listener.getsockname()[:2])
    await make().serve(listener, stop)


def run_command(arguments: list[str] | None = None) -> int:
    """Run the command, by default that of `sys.argv`; returns the exit code. An error is one line on standard error."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        return cli(arguments, standalone_mode=False, prog_name="naiad agent") or 0
    except (BadOption, EnvironmentFailed) as error:
        typer.echo(f"error: {error}", err=True)
    except ServingError as error:
        typer.echo(f"error: {error.message}", err=True)
    except OSError as error:
        typer.echo(f"error: the agent cannot listen: {error}", err=True)
    except TyperException as error:
        typer.echo(f"error: {error.format_message().rstrip('.')}. See 'naiad agent --help'", err=True)
    return 1


if __name__ == "__main__":
    sys.exit(run_command())
