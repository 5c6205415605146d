"""`python -m bench.oracle`: our responses to all conformance cases compared with a real Triton's."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from bench.oracle import servers
from bench.oracle.responses import Record, Stale, StepResponse, cleaned, expected, is_expected, load_cases, verdict
from bench.triton import NotAvailable

if TYPE_CHECKING:
    from bench.oracle.steps import Case

#: The responses to the cases of one file, in order.
Responses = list[tuple["Case", list[StepResponse]]]


def responses_of(server: servers.Ours | servers.Triton, cases: list[Case]) -> Responses:
    """Send all steps of all cases to one server."""
    return [
        (case, [cleaned(server.ask(step), step.ignore, server.repository) for step in case.steps]) for case in cases
    ]


def show(response: StepResponse) -> str:
    return f"{response.status}  {response.error or ''}  {json.dumps(response.body)[:1500]}"


def compare(name: str, ours: Responses, theirs: Responses, *, verbose: bool) -> Counter[str]:
    """Print the differences between two servers. A step with a documented difference counts as `allowed`."""
    counted: Counter[str] = Counter()
    for (case, mine), (_, real) in zip(ours, theirs, strict=True):
        for number, (step, a, b) in enumerate(zip(case.steps, mine, real, strict=True), 1):
            found = verdict(a, b)
            label: str = found
            if step.difference is not None:
                label = "allowed" if is_expected(a, expected(b, step.difference)) else "changed"
            counted[label] += 1
            if label not in ("same", "allowed") or verbose:
                print(f"{label:8} {name}: {case.name} [{number}]")
                print(f"         ours   {show(a)}\n         triton {show(b)}")
    return counted


def recorded(path: Path, cases: list[Case]) -> Responses:
    """Return the recorded responses. A step without one gets the status `not recorded`."""
    record = Record.read(path)
    found: Responses = []
    for case in cases:
        responses = []
        for number, step in enumerate(case.steps):
            try:
                responses.append(record.response(case, number, step))
            except Stale:
                responses.append(StepResponse("not recorded"))
        found.append((case, responses))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.oracle", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="files of cases; without one, all")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--record", action="store_true", help="write Triton's responses for the test suite")
    parser.add_argument("--recorded", action="store_true", help="compare with the recorded responses, without a Triton")
    parser.add_argument("-v", "--verbose", action="store_true", help="also show steps that are the same")
    parser.add_argument(
        "--suite", type=Path, default=servers.SUITE, help="the folder with cases, their models, and what is recorded"
    )
    options = parser.parse_args()
    models, records = options.suite / "models", options.suite / "recorded"
    files = options.files or sorted((options.suite / "cases").glob("*.py"))
    for path in files:
        if path.suffix != ".py" or not path.is_file():
            parser.error(f"'{path}' is not a file of cases, such as {options.suite / 'cases' / 'in_time.py'}")
    cases = {path.stem: [case for case in load_cases(path) if options.only in case.name] for path in files}
    theirs: dict[str, Responses] = {}
    try:
        if options.recorded:
            theirs = {name: recorded(records / f"{name}.json", found) for name, found in cases.items()}
        else:
            with servers.Triton(models) as real:
                theirs = {name: responses_of(real, found) for name, found in cases.items()}
    except NotAvailable as error:
        print(error, file=sys.stderr)
        return 2
    if options.record:
        for name, found in theirs.items():
            path = records / f"{name}.json"
            record = Record.read(path) if options.only else Record({})
            for case, kept in found:
                record.put(case, kept)
            record.write(path)
    counted: Counter[str] = Counter()
    with servers.Ours(models) as ours:
        for name, wanted in cases.items():
            counted += compare(name, responses_of(ours, wanted), theirs[name], verbose=options.verbose)
    print(", ".join(f"{count} {label}" for label, count in counted.most_common()), f"of {counted.total()}")
    return 0 if counted.total() == counted["same"] + counted["allowed"] else 1


if __name__ == "__main__":
    sys.exit(main())
