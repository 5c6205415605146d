"""`python -m bench [rows | start | micro]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import compare, micro, start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the server. Use a quiet machine.")
    commands = parser.add_subparsers(dest="command", metavar="rows | start | micro")
    rows = commands.add_parser("rows", help="our server and a real Triton under NVIDIA's perf_analyzer (the default)")
    for each in (parser, rows):
        each.add_argument("--only", default="", help="only rows whose name contains this")
        each.add_argument("--rounds", type=int, default=3, help="rounds per row and server")
        each.add_argument("--seconds", type=float, default=1.0, help="length of a window; a round has three")
        each.add_argument("--output", type=Path, help="write figures and settings to this JSON file")
        each.add_argument("--without-triton", action="store_true", help="measure our server alone")
    commands.add_parser("start", help="time and memory of a start")
    commands.add_parser("micro", help="the parts of a request, one by one")
    arguments = parser.parse_args()
    if arguments.command == "start":
        start.run()
    elif arguments.command == "micro":
        micro.run()
    else:
        return compare.run(
            arguments.only, arguments.rounds, arguments.seconds, arguments.output,
            with_triton=not arguments.without_triton,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
