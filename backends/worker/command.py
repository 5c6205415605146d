"""The command line of a worker that is a new interpreter: the server's (`python -m backends.worker`), or another one."""

from __future__ import annotations

import argparse

from backends.worker.process import run_worker


def main() -> None:
    """Run the worker that the command line describes."""
    parser = argparse.ArgumentParser(description="A worker process of the server; started by it, not by hand.")
    parser.add_argument("--model", required=True, help="name of the model instance, shown in process lists")
    parser.add_argument("--fd", type=int, required=True, help="the worker's end of the Unix socket to the kernel")
    parser.add_argument("--kernel", type=int, required=True, help="process id of the kernel")
    parser.add_argument("--remote", action="store_true", help="share no memory with the kernel")
    parser.add_argument("--helper", metavar="MODULE", default="", help="run tasks of this module, and no model")
    arguments = parser.parse_args()
    run_worker(arguments.model, arguments.fd, arguments.kernel, remote=arguments.remote, task_module=arguments.helper)
