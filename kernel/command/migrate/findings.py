"""`MigrationFinding`: a line of the report of `naiad check --migrate`. Pure."""

from __future__ import annotations

import msgspec

#: It does not work as it is, or it works and there is something to know.
CHANGE, NOTE = "change", "note"


class MigrationFinding(msgspec.Struct, frozen=True):
    """What was found about a model, a flag or a metric."""

    #: `CHANGE` or `NOTE`.
    kind: str
    #: The model, the flag, or the file and the metric.
    subject: str
    text: str


def report_section(title: str, findings: list[MigrationFinding], count: int) -> str:
    """Return a section of the report: changes first. `count` is how many subjects were looked at."""
    changes = [each for each in findings if each.kind == CHANGE]
    notes = [each for each in findings if each.kind == NOTE]
    subjects = len({each.subject for each in changes})
    verdict = f"{subjects} of {count} need a change" if subjects else f"all {count} stay as they are"
    lines = [f"{title}: {verdict if count else 'none'}"]
    lines += [f"  CHANGE  {each.subject}: {each.text}" for each in changes]
    lines += [f"  note    {each.subject}: {each.text}" for each in notes]
    return "".join(f"{line}\n" for line in lines)
