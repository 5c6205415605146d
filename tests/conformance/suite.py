"""A suite of cases: our responses beside those that a real Triton has given."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bench.oracle.responses import Record, cleaned, expected, is_expected, load_cases
from bench.oracle.servers import Ours

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bench.oracle.steps import Case


#: How often a case is sent whose requests race: on a busy machine one may be sent, or served, later than planned.
RACES = 10


class Suite:
    """A folder with `cases`, `models` and `recorded`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        paths = sorted((folder / "cases").glob("*.py"))
        #: Each case with the name of its file.
        self.cases = [(path.stem, case) for path in paths for case in load_cases(path)]
        self.ids = [f"{name}: {case.name}" for name, case in self.cases]

    @contextlib.contextmanager
    def served(self, *, may_fail: bool = False) -> Iterator[Ours]:
        """Serve the models. Without `may_fail`, the log must have no traceback at the end: none of them raises."""
        with Ours(self._folder / "models") as running:
            yield running
            assert may_fail or "Traceback" not in running.process.log, running.process.log

    def wrong_steps(self, ours: Ours, name: str, case: Case) -> list[str]:
        """Send the steps of a case, and return a text for each response that is not as expected.

        A case whose requests race is sent again if one of its responses is not: it loads its model anew.
        """
        races = any(step.kind == "racing" for step in case.steps)
        wrong: list[str] = []
        for _ in range(RACES if races else 1):
            wrong = self._wrong_steps(ours, name, case)
            if not wrong:
                break
        return wrong

    def _wrong_steps(self, ours: Ours, name: str, case: Case) -> list[str]:
        record = Record.read(self._folder / "recorded" / f"{name}.json")
        wrong = []
        for number, step in enumerate(case.steps):
            theirs = record.response(case, number, step)
            wanted = expected(theirs, step.difference)
            found = cleaned(ours.ask(step), step.ignore, ours.repository)
            title = f"{case.name}, step {number + 1}"
            if not is_expected(found, wanted):
                wrong.append(f"{title}: {step.args}\n  ours   {found}\n  wanted {wanted}")
            elif step.difference is not None and found == theirs:
                wrong.append(f"{title} differs no longer: {step.difference.reason}")
        return wrong

    def check_recorded(self) -> None:
        """Check that each recorded case is asked for, and each case recorded."""
        asked: dict[str, set[str]] = {}
        for name, case in self.cases:
            asked.setdefault(name, set()).add(case.name)
        recorded = {path.stem: Record.read(path).names() for path in (self._folder / "recorded").glob("*.json")}
        assert recorded == asked
