"""`python -m bench.oracle`: our answers to all conformance cases beside those of a real Triton."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from bench.oracle import servers
from bench.oracle.record import Record, Stale, load_cases
from bench.oracle.responses import StepResponse, cleaned, expected, is_expected, verdict
from bench.triton import NotAvailable

if TYPE_CHECKING:
    from bench.oracle.steps import Case

#: Answers of one file's cases, in order.
Responses = list[tuple["Case", list[StepResponse]]]


def responses_of(server: servers.Ours | servers.Triton, cases: list[Case]) -> Responses:
    """Take all steps of all cases on one server."""
    return [
        (case, [cleaned(server.ask(step), step.ignore, server.repository) for step in case.steps]) for case in cases
    ]


def show(answer: StepResponse) -> str:
    return f"{answer.status}  {answer.error or ''}  {json.dumps(answer.body)[:1500]}"


def compare(name: str, ours: Responses, theirs: Responses, *, verbose: bool) -> Counter[str]:
    """Print where two servers differ; steps that differ as they may count as `allowed`."""
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
    """Return the recorded answers; a step without one gets an answer that says so."""
    record = Record.read(path)
    found: Responses = []
    for case in cases:
        told = []
        for number, step in enumerate(case.steps):
            try:
                told.append(record.answer(case, number, step))
            except Stale:
                told.append(StepResponse("not recorded"))
        found.append((case, told))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.oracle", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="files of cases; all where none is given")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--record", action="store_true", help="write Triton's answers for the test suite")
    parser.add_argument("--recorded", action="store_true", help="compare with the record, without a Triton")
    parser.add_argument("-v", "--verbose", action="store_true", help="show steps that are the same, too")
    told = parser.parse_args()
    files = told.files or sorted(servers.CASES.glob("*.py"))
    cases = {path.stem: [case for case in load_cases(path) if told.only in case.name] for path in files}
    theirs: dict[str, Responses] = {}
    try:
        if told.recorded:
            theirs = {name: recorded(servers.RECORDED / f"{name}.json", found) for name, found in cases.items()}
        else:
            with servers.Triton(servers.MODELS) as real:
                theirs = {name: responses_of(real, found) for name, found in cases.items()}
    except NotAvailable as error:
        print(error, file=sys.stderr)
        return 2
    if told.record:
        for name, found in theirs.items():
            path = servers.RECORDED / f"{name}.json"
            record = Record.read(path) if told.only else Record({})
            for case, kept in found:
                record.put(case, kept)
            record.write(path)
    counted: Counter[str] = Counter()
    with servers.Ours(servers.MODELS) as ours:
        for name, asked in cases.items():
            counted += compare(name, responses_of(ours, asked), theirs[name], verbose=told.verbose)
    print(", ".join(f"{count} {label}" for label, count in counted.most_common()), f"of {counted.total()}")
    return 0 if counted.total() == counted["same"] + counted["allowed"] else 1


if __name__ == "__main__":
    sys.exit(main())
