"""`naiad check --migrate`: what of a Triton repository, its start command and its dashboards needs a change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from kernel.command.migrate.dashboards import dashboard_findings
from kernel.command.migrate.findings import CHANGE, NOTE, MigrationFinding, report_section
from kernel.command.migrate.models import model_findings
from kernel.command.migrate.start_command import command_findings
from kernel.command.models import examine
from kernel.options import BadOption

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Files with dashboards and rules; others in a folder are left out.
_ENDINGS = (".json", ".yaml", ".yml", ".rules", ".jsonnet", ".libsonnet")

#: The most files of a model's folder that are listed.
_MOST_FILES = 10_000


class MigrationSection(msgspec.Struct, frozen=True):
    """A part of the report."""

    title: str
    #: How many models, flags or metrics were looked at.
    count: int
    findings: list[MigrationFinding]


def check_migration(path: Path, command: str, dashboards: Sequence[Path], *, as_json: bool, verbose: bool) -> int:
    """Print the report. Returns 1 if something needs a change, else 0. Raises `BadOption`.

    `command` is a start command, or the name of a file that has it; "" for none.
    """
    texts = list(_dashboard_texts(dashboards))
    sections = [_models(path, verbose=verbose)]
    if command:
        findings, flags = command_findings(_command_text(command))
        sections.append(MigrationSection("Start command", len(flags), findings))
    if dashboards:
        found = [dashboard_findings(name, text) for name, text in texts]
        sections.append(
            MigrationSection("Metrics in dashboards and rules", sum(count for _, count in found),
                             [each for findings, _ in found for each in findings])
        )  # fmt: skip
    changes = sum(each.kind == CHANGE for section in sections for each in section.findings)
    notes = sum(each.kind == NOTE for section in sections for each in section.findings)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(sections), indent=2).decode())
    else:
        for section in sections:
            typer.echo(report_section(section.title, section.findings, section.count))
        more = "" if command and dashboards else f". Also look at {_not_given(command, dashboards)}"
        needed = f"{changes} changes are" if changes > 1 else "1 change is" if changes else "no change is"
        typer.echo(f"{needed} needed; there are {notes} notes{more}")
    return 1 if changes else 0


def _not_given(command: str, dashboards: Sequence[Path]) -> str:
    parts = [] if command else ["the start command (--start-command FILE)"]
    parts += [] if dashboards else ["dashboards and alert rules (--dashboards FOLDER)"]
    return " and ".join(parts)


def _models(path: Path, *, verbose: bool) -> MigrationSection:
    examination = examine([path], quick=False, verbose=verbose)
    if not examination.results:
        raise BadOption(examination.hints[0] if examination.hints else f"there is no model in '{path}'")
    findings = [MigrationFinding(NOTE, str(path), hint) for hint in examination.hints]
    for each in examination.sorted_results:
        findings += model_findings(each, _files(each.path))
    return MigrationSection("Models", len(examination.results), findings)


def _files(folder: str) -> list[str]:
    """Return the files in a model's folder; not what is in archives, such as packed environments."""
    found: list[str] = []
    for parent, _, names in os.walk(folder):
        found += [os.path.relpath(os.path.join(parent, name), folder) for name in names]
        if len(found) > _MOST_FILES:
            break
    return found


def _command_text(command: str) -> str:
    """Return the text of a command, or of the file that it names."""
    path = Path(command)
    try:
        if "--" not in command and " " not in command:
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadOption(f"--start-command: cannot read '{command}': {reason}") from None
    return command


def _dashboard_texts(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the files, and of those in folders. Raises `BadOption`."""
    for path in paths:
        files = sorted(each for each in path.rglob("*") if each.suffix in _ENDINGS) if path.is_dir() else [path]
        for file in files:
            try:
                yield str(file.relative_to(path)) if path.is_dir() else file.name, file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no text"
                raise BadOption(f"--dashboards: cannot read '{file}': {reason}") from None
