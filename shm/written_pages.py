"""Which pages of a private mapping this process has written to. Of these it has private copies.

Linux says so in /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst): eight bytes for each page, in which bit
63 means present, bit 62 swapped out, and bit 61 that the page is one of the file.
"""

from __future__ import annotations

import mmap
import os

#: What the highest bits of a page are that was not written: it was never touched, or is one of the file.
_UNTOUCHED, _OF_FILE = 0b000, 0b101

#: The values of the highest byte of such a page.
_UNWRITTEN = bytes(value for value in range(256) if value >> 5 in (_UNTOUCHED, _OF_FILE))

#: The most pages whose entries are read at once: 64 MiB.
MOST_PAGES = 16 << 10


def unwritten(address: int, byte_size: int) -> bool:
    """Whether none of the pages of these bytes, which are mapped privately, was written to.

    False if the system does not say. 16 MiB take 0.25 ms, which is a sixth of the time that a copy takes.
    """
    page, end = address // mmap.PAGESIZE, -(-(address + byte_size) // mmap.PAGESIZE)
    try:
        # Opened each time: a descriptor stays of the process which has opened it, also after a fork.
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        while page < end:
            count = min(end - page, MOST_PAGES)
            entries = os.pread(fd, 8 * count, 8 * page)  # in the byte order of the machine, which is little-endian
            if len(entries) < 8 * count or entries[7::8].translate(None, _UNWRITTEN):
                return False
            page += count
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
