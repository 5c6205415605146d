"""`python -m tests.simulation`: run many seeds, or one with its story.

python -m tests.simulation --seeds 10000 --jobs 2
python -m tests.simulation --seed 17 --story
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
import time
from typing import TYPE_CHECKING

from bench.progress import progress
from tests.simulation.kinds import load_kinds
from tests.simulation.run import Simulation, portion
from tests.simulation.scenarios import scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seeds that a process runs before it reports.
_PORTION = 50


def _portions(options: argparse.Namespace) -> Iterator[tuple[range, str]]:
    end = options.first + options.seeds
    for first in range(options.first, end, _PORTION):
        yield range(first, min(end, first + _PORTION)), options.kind


def run_many(options: argparse.Namespace) -> int:
    """Run many seeds in processes. Returns the exit code."""
    began, steps, requests = time.monotonic(), 0, 0
    stories: list[str] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, context) as pool, progress() as bar:
        shown = bar.add_task("seeds", total=options.seeds)
        running = [pool.submit(portion, *task) for task in _portions(options)]
        for done in concurrent.futures.as_completed(running):
            count, more_steps, more_requests, found = done.result()
            steps, requests = steps + more_steps, requests + more_requests
            bar.advance(shown, count)
            for story in found:
                bar.console.print(story, markup=False, highlight=False, soft_wrap=True)
            stories += found
            if len(stories) >= options.stop_after:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    print(
        f"{options.seeds} seeds, {steps} steps, {requests} requests in {time.monotonic() - began:.0f} s: "
        f"{len(stories)} failed"
    )
    return 1 if stories else 0


def run_one(options: argparse.Namespace) -> int:
    """Run one seed. Returns the exit code."""
    with Simulation(only=options.kind) as simulation:
        world, failure = simulation.world(scenario(options.seed, load_kinds(), options.kind))
        if failure is None:
            if options.story:
                print("\n".join(world.story.lines()))
            print(f"seed {options.seed}: all held, {len(world.clients)} requests in {world.steps} steps")
            return 0
        print((failure if options.story else simulation.shortened(failure)).text(last=0 if options.story else 40))
        return 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes run them")
    parser.add_argument("--kind", default="", choices=["", *load_kinds()], help="only models of this kind")
    parser.add_argument("--stop-after", type=int, default=5, help="stop when this many seeds have failed")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--story", action="store_true", help="with --seed: print all that happens")
    options = parser.parse_args()
    return run_many(options) if options.seed is None else run_one(options)


if __name__ == "__main__":
    sys.exit(main())
