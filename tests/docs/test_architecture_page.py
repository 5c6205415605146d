"""docs/architecture.md against the tree: every folder, the eight steps, what may import what."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.documents import ROOT, code_spans, document, section, table

PAGE = document("docs/architecture.md")

PACKAGES = ("shm", "kernel", "schedulers", "backends", "protocols")

#: The one module that imports everything, and the one that starts a zygote before.
COMPOSITION_ROOT = ROOT / "kernel" / "app.py"
START = ROOT / "kernel" / "start.py"

#: A package that tests put in the place of the real one.
FAKE_PACKAGE = Path("tests/fake_vllm/vllm")


def folders_of_the_tree() -> set[str]:
    """Return the folders that a reader meets: with Python files or documents, outside of model repositories."""
    files = [path for top in (*PACKAGES, "bench", "tests") for path in (ROOT / top).rglob("*.py")]
    files += (ROOT / "docs").rglob("*.md")
    found = {path.parent.relative_to(ROOT) for path in files}
    models = {
        path.parent.relative_to(ROOT)
        for top in ("kernel", "bench", "tests")
        for path in (ROOT / top).rglob("config.pbtxt")
    }
    # Versions of a model are in its folder; a model without a configuration is beside one that has it.
    repositories = {model.parent for model in models}
    # The inside of a fake package is laid out as the real one.
    outer = repositories | {FAKE_PACKAGE}
    inside = {folder for folder in found if any(parent in outer for parent in folder.parents)}
    # Folders of tests mirror those of what they test.
    mirrors = {folder for folder in found if folder.parts[0] == "tests" and (ROOT / Path(*folder.parts[1:])).is_dir()}
    named = {Path("tests"), Path("tests/docs")}
    # Folders of a package of another project, whose names are not ours.
    inside |= {folder for folder in found if Path("tests/fake_vllm") in folder.parents}
    return {str(folder) for folder in found - inside - (mirrors - named)}


def test_every_folder_is_named_and_every_folder_that_is_named_exists() -> None:
    named = re.findall(r"^- `([\w/]+)`: \S", section(PAGE, "Folders"), re.MULTILINE)
    assert len(named) == len(set(named))
    missing = folders_of_the_tree() - set(named)
    assert missing == set()
    assert {name for name in named if not (ROOT / name).is_dir()} == set()


def test_a_request_takes_eight_steps_each_with_the_modules_that_do_it() -> None:
    steps = re.split(r"^\d\. ", section(PAGE, "The eight steps of a request"), flags=re.MULTILINE)[1:]
    assert len(steps) == 8
    for step in steps[:-1]:
        assert any("/" in span for span in code_spans(step)), step


def imported_packages(package: str) -> set[str]:
    """Return which packages of ours the modules of a package import, also for types."""
    found: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        if path in (COMPOSITION_ROOT, START) or {"demo", "importable"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found & set(PACKAGES) - {package}


def test_the_table_of_imports_is_what_the_packages_import() -> None:
    rows = table(section(PAGE, "What may import what"))
    stated = {code_spans(package)[0]: set(code_spans(allowed)) for package, allowed in rows}
    assert stated == {package: imported_packages(package) for package in PACKAGES}


def test_the_modules_to_read_first_are_as_long_as_the_page_says() -> None:
    text = section(PAGE, "The eight steps of a request")
    paragraph = text[text.index("To read the code") :]
    lines = sum((ROOT / path).read_text().count("\n") for path in code_spans(paragraph))
    match = re.search(r"about ([\d,]+) lines", paragraph)
    assert match is not None
    assert abs(lines - int(match[1].replace(",", ""))) < 200
