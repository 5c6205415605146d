"""The descriptor pool of the generated protobuf modules.

A pool of our own, because `tritonclient` registers messages of the same names in protobuf's default
pool, and a name can be registered once only; both must work in one process.
"""

from __future__ import annotations

from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
