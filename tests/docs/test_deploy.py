"""docs/deploy: linters of packages judge the files, where they are installed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kernel.flags.read import FLAGS, PREFIX, flags_of_environment
from kernel.options import RepositoryOptions, ServerOptions
from tests.docs.documents import ROOT, document

FOLDER = ROOT / "docs" / "deploy"
CONTAINERFILE, UNIT, MANIFEST = (FOLDER / name for name in ("Containerfile", "naiad.service", "kubernetes.yaml"))


def lint(*command: str) -> str:
    """Return what a linter complains of."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def beside_python(program: str) -> str:
    """Return the path of a program of a package; skips the test where the package is not installed."""
    path = Path(sys.executable).parent / program
    if not path.exists():
        pytest.skip(f"'{program}' is not installed: pip install --group deploy")
    return str(path)


def test_the_containerfile_is_short_and_has_no_complaints() -> None:
    assert len(CONTAINERFILE.read_text().splitlines()) < 36
    # Packages of a stable Debian get only fixes, and a mirror has only the newest of them: no version is pinned.
    assert lint(beside_python("hadolint"), "--ignore=DL3008", str(CONTAINERFILE)) == ""


def test_the_containerfile_copies_every_package_of_the_server() -> None:
    packages = re.findall(r'"(\w+)\*"', document("pyproject.toml"))
    assert len(packages) == 5
    assert set(packages) <= set(re.findall(r"^COPY (\w+) ", CONTAINERFILE.read_text(), re.MULTILINE))


def test_the_image_runs_as_a_user_and_has_a_health_check_of_its_own() -> None:
    """`make image` builds and tries it, where a builder is."""
    last_stage = CONTAINERFILE.read_text().rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*$", last_stage, re.MULTILINE)
    assert re.search(r'^HEALTHCHECK .*CMD \["naiad", "ready"\]$', last_stage, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["naiad"\]\nCMD \["run"\]$', last_stage, re.MULTILINE)
    assert re.search("pip install|build-essential|gcc", last_stage) is None


def test_both_stages_have_the_same_python() -> None:
    images = re.findall(r"^FROM (\S+)", CONTAINERFILE.read_text(), re.MULTILINE)
    assert len(images) == 2
    assert len(set(images)) == 1


def test_the_builder_is_given_what_the_containerfile_copies() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE.read_text(), re.MULTILINE)
    given = re.findall(r"^!(.+)$", CONTAINERFILE.with_name("Containerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(" ".join(copied).split()) == sorted(given)


LOCKS = ("docs/deploy/requirements.lock", "docs/deploy/build.lock")


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Return the packages of a lock file: their versions, and how many hashes each has."""
    blocks = re.split(r"^(?=[a-z])", document(name), flags=re.MULTILINE)[1:]
    found = {}
    for block in blocks:
        package, version = block.split()[0].split("==")
        found[package] = version, block.count("--hash=sha256:")
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_the_image_has_one_version_and_hashes_and_no_index_of_its_own(name: str) -> None:
    assert locked(name)
    assert all(version and hashes for version, hashes in locked(name).values())
    assert "://" not in document(name)


def test_the_lock_has_every_dependency_in_a_version_that_the_project_allows() -> None:
    project = tomllib.loads(document("pyproject.toml"))["project"]
    versions = locked(LOCKS[0])
    for requirement in map(Requirement, project["dependencies"]):
        assert requirement.specifier.contains(versions[requirement.name.lower()][0]), requirement


def test_the_image_has_only_packages_of_the_locks() -> None:
    installs = re.findall(r"pip install (.*?)(?: &&|\n(?! ))", CONTAINERFILE.read_text().replace("\\\n", ""), re.DOTALL)
    assert len(installs) == 2
    assert "--require-hashes" in installs[0]
    assert {"--no-deps", "--no-build-isolation"} <= set(installs[1].split())


def test_the_server_has_time_to_end_before_it_is_killed() -> None:
    seconds = ServerOptions(RepositoryOptions(paths=())).exit_timeout_s
    manifest = MANIFEST.read_text()
    grace, pause = (
        int(re.findall(rf"{name}: (\d+)", manifest)[-1]) for name in ("GracePeriodSeconds", "sleep: {seconds")
    )
    assert grace >= pause + seconds + 20
    assert int(re.findall(r"TimeoutStopSec=(\d+)", UNIT.read_text())[0]) >= seconds + 20
    assert int(re.findall(r"--stop-timeout (\d+)", CONTAINERFILE.read_text())[0]) >= seconds + 20


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_the_manifest_fits_kubernetes(version: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("'kubernetes-validate' is not installed: pip install --group deploy")
    command = beside_python("kubernetes-validate")
    assert lint(command, "--strict", "--quiet", "-k", version, str(MANIFEST)) == ""


def test_the_unit_is_one_that_systemd_understands(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("'systemd-analyze' is not installed: it is in the package systemd")
    unit = tmp_path / UNIT.name
    # systemd looks for the program.
    unit.write_text(UNIT.read_text().replace("/opt/naiad/bin/naiad run", f"{sys.executable} run"))
    assert lint(analyze, "verify", "--man=no", str(unit)) == ""


@pytest.mark.parametrize("path", [CONTAINERFILE, UNIT, MANIFEST], ids=lambda path: path.name)
def test_every_variable_is_a_flag_with_a_right_value(path: Path) -> None:
    text = path.read_text()
    found = dict(re.findall(rf'^(?!#).*?({PREFIX}\w+)(?:=|, value: )"?([^\s"}}]+)', text, re.MULTILINE))
    assert found
    _, notes = flags_of_environment(found, FLAGS.values())
    assert notes == []
