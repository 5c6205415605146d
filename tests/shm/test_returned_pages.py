from __future__ import annotations

from shm.returned_pages import SLICE_BYTE_SIZE, ReturnedPages


def test_pages_are_given_back_in_slices_block_after_block() -> None:
    removed: list[tuple[int, int]] = []
    returned: list[int] = []
    pages = ReturnedPages(lambda offset, size: removed.append((offset, size)), returned.append)
    assert not pages
    large, begin = 2 * SLICE_BYTE_SIZE + 4096, 1 << 30
    pages.add(begin, large)
    pages.add(0, 4096)
    for _ in range(3):
        assert returned == []
        pages.step()
    assert removed == [
        (begin, SLICE_BYTE_SIZE), (begin + SLICE_BYTE_SIZE, SLICE_BYTE_SIZE), (begin + 2 * SLICE_BYTE_SIZE, 4096),
    ]  # fmt: skip
    assert returned == [begin]
    pages.finish()
    assert returned == [begin, 0]
    assert not pages
