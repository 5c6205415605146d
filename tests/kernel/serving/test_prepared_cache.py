from __future__ import annotations

from kernel.serving.prepared import PreparedCache


def cache_with(*keys: str, max_entries: int = 3) -> PreparedCache[str, int]:
    cache: PreparedCache[str, int] = PreparedCache(max_entries)
    cache.start_generation(7)
    for number, key in enumerate(keys):
        cache.add(key, number)
    return cache


def test_a_new_cache_is_valid_for_no_generation() -> None:
    assert PreparedCache[str, int](3).generation < 0


def test_what_was_added_is_found_by_its_key() -> None:
    cache = cache_with("a", "b")
    assert cache.generation == 7
    assert cache.entries.get("b") == 1
    assert cache.entries.get("c") is None


def test_a_new_generation_drops_everything() -> None:
    cache = cache_with("a")
    cache.start_generation(8)
    assert cache.generation == 8
    assert cache.entries == {}


def test_a_full_cache_is_emptied_for_a_new_key_and_not_for_a_known_one() -> None:
    cache = cache_with("a", "b", "c")
    cache.add("b", 10)
    assert cache.entries == {"a": 0, "b": 10, "c": 2}
    cache.add("d", 11)
    assert cache.entries == {"d": 11}
