"""Entry point of the process that prepares an environment: `python -m backends.environments --fd N ...`."""

from __future__ import annotations

import argparse
import signal
import socket
import sys

from backends.environments import messages
from backends.environments.preparation import prepare
from backends.process_control import die_with_parent, set_process_name


def main() -> None:
    """Respond on the socket to the request of the command line."""
    parser = argparse.ArgumentParser(description="Prepares an environment of a model; started by the server.")
    parser.add_argument("--model", required=True, help="name of the model, shown in process lists")
    parser.add_argument("--fd", type=int, required=True, help="this process's end of the socket to the kernel")
    parser.add_argument("--kernel", type=int, required=True, help="process id of the kernel")
    parser.add_argument("--request", required=True, help="the request as JSON")
    arguments = parser.parse_args()
    die_with_parent(arguments.kernel)
    set_process_name(f"env {arguments.model}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C only the kernel acts
    request = messages.request_decoder.decode(arguments.request)
    response: messages.EnvironmentPrepared | messages.EnvironmentRefused
    try:
        response = prepare(request, _say)
    except messages.EnvironmentFailed as error:
        response = messages.EnvironmentRefused(str(error))
    with socket.socket(fileno=arguments.fd) as connection:
        connection.sendall(messages.encode(response))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


main()
