"""The descriptor pool of the generated protobuf modules.

`tritonclient` registers messages with the same names in protobuf's default pool, and a pool accepts each
name only once. A separate pool lets both packages work in one process.
"""

from __future__ import annotations

from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
