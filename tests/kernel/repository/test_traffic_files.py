"""Traffic rules beside the configurations of models."""

from __future__ import annotations

import asyncio

from kernel.errors import InternalError, ServingError
from kernel.repository.layout import Entry, find_models, without_traffic
from kernel.repository.traffic_files import TrafficFiles

CONFIG = Entry("config.pbtxt", modified_ns=5)
VERSION = Entry("1", is_folder=True, modified_ns=3)


def listing(*children: Entry) -> Entry:
    newest = max(child.modified_ns for child in children)
    return Entry("m", is_folder=True, modified_ns=newest, children=children)


def rule(modified_ns: int) -> Entry:
    return Entry("traffic.toml", modified_ns=modified_ns)


class Rules:
    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes | None, ServingError | None]] = []

    def set_file(self, name: str, text: bytes | None, error: ServingError | None = None) -> None:
        self.seen.append((name, text, error))

    def kept_versions(self, name: str) -> set[int]:
        return {1, 2}


def test_a_changed_rule_does_not_change_the_model() -> None:
    bare = find_models({"/r": [listing(CONFIG, VERSION)]})
    for time_ns in (9, 10):
        found = find_models({"/r": [listing(CONFIG, VERSION, rule(time_ns))]})
        assert found.models == bare.models
        assert found.traffic["m"].path == "/r/m/traffic.toml"
        assert found.traffic["m"].entry.modified_ns == time_ns
    assert without_traffic(listing(CONFIG)) == listing(CONFIG)


def test_a_folder_of_that_name_is_no_rule() -> None:
    folder = Entry("traffic.toml", is_folder=True)
    assert find_models({"/r": [listing(CONFIG, folder)]}).traffic == {}


def test_each_rule_is_read_when_it_is_new_or_changed_and_dropped_when_it_is_gone() -> None:
    contents = {"/r/m/traffic.toml": b"one"}
    files, rules = TrafficFiles(contents.__getitem__), Rules()

    async def main() -> None:
        await files.read(find_models({"/r": [listing(CONFIG, rule(1))]}))  # nothing uses it yet
        files.rules = rules
        for _ in range(2):
            await files.read(find_models({"/r": [listing(CONFIG, rule(1))]}))
        contents["/r/m/traffic.toml"] = b"two"
        await files.read(find_models({"/r": [listing(CONFIG, rule(2))]}), ["m"])
        await files.read(find_models({"/r": []}), ["other"])
        for _ in range(2):
            await files.read(find_models({"/r": [listing(CONFIG)]}))

    asyncio.run(main())
    assert rules.seen == [("m", b"one", None), ("m", b"two", None), ("m", None, None)]


def test_a_rule_that_cannot_be_read_is_tried_again() -> None:
    error = InternalError("failed to read it")

    def read(path: str) -> bytes:
        if not rules.seen:
            raise error
        return b"now"

    files, rules = TrafficFiles(read), Rules()
    files.rules = rules

    async def main() -> None:
        for _ in range(2):
            await files.read(find_models({"/r": [listing(CONFIG, rule(1))]}))

    asyncio.run(main())
    assert rules.seen == [("m", None, error), ("m", b"now", None)]


def test_a_version_that_a_rule_names_is_loaded_beside_those_of_the_policy() -> None:
    files = TrafficFiles(dict[str, bytes]().__getitem__)
    assert files.versions("m", [3], (1, 3)) == [3]
    files.rules = Rules()
    assert files.versions("m", [3], (1, 3)) == [1, 3], "version 2 is not there"
