from __future__ import annotations

import pytest

from kernel.config.load import from_pbtxt
from kernel.errors import BadConfig
from kernel.repository.versions import available_versions, choose_versions, missing_versions


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        ("latest { num_versions: 1 }", [10]),
        ("latest { num_versions: 2 }", [3, 10]),
        ("latest { num_versions: 9 }", [1, 3, 10]),
        ("all {}", [1, 3, 10]),
        ("specific { versions: [3, 1, 7] }", [1, 3]),
        ("specific { versions: [10, 10] }", [10]),
    ],
)
def test_the_policy_selects_among_the_available_versions(policy: str, chosen: list[int]) -> None:
    config = from_pbtxt(f"version_policy {{ {policy} }}".encode(), "")
    assert choose_versions(config, [10, 1, 3]) == chosen


@pytest.mark.parametrize(
    ("policy", "available"),
    [
        ("latest { num_versions: 1 }", []),
        ("latest { num_versions: 0 }", [1]),
        ("all {}", []),
        ("specific { versions: [9] }", [1]),
        ("specific {}", [1]),
    ],
)
def test_a_policy_without_an_available_version_is_an_error(policy: str, available: list[int]) -> None:
    config = from_pbtxt(f'name: "m" version_policy {{ {policy} }}'.encode(), "")
    with pytest.raises(BadConfig) as caught:
        choose_versions(config, available)
    assert caught.value.message == ("at least one version must be available under the version policy of model 'm'")


def test_absent_versions_that_the_policy_names_cause_warnings() -> None:
    config = from_pbtxt(b'name: "m" version_policy { specific { versions: [9, 1, 2, 9] } }', "")
    assert missing_versions(config, [1]) == [
        "version 2 is specified for model 'm', but the version directory is not present",
        "version 9 is specified for model 'm', but the version directory is not present",
    ]
    assert missing_versions(from_pbtxt(b"version_policy { all {} }", ""), []) == []


@pytest.mark.parametrize(
    ("config", "found", "available"),
    [
        ("ensemble_scheduling {}", [], [1]),
        ("ensemble_scheduling {} version_policy { specific { versions: [3, 5] } }", [], [3, 5]),
        ("ensemble_scheduling {}", [2], [2]),
        ("", [], []),
    ],
)
def test_an_ensemble_without_a_folder_of_a_version_has_one(config: str, found: list[int], available: list[int]) -> None:
    assert list(available_versions(from_pbtxt(config.encode(), ""), found)) == available
