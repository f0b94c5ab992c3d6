"""The C library's allocator, told to keep the memory that a training step frees."""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER = -1
USERS_OWN = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)
"""Environment variables by which users set the allocator themselves."""


def keep_freed_memory() -> bool:
    """Let this process keep freed buffers for the next request.

    glibc gives large buffers back to the system as soon as they are freed, and the system hands
    them out again page by page, zeroed. A training step frees all that the next one asks for, so
    on a CPU a small model spends a third of its time or more on that (docs/performance.md). Results
    stay as they are. The peak grows by about a quarter, as kept buffers of one size do not serve
    another, and the process holds it until it ends.

    Returns:
        Whether the allocator took the setting: False with another C library, and where an
        environment variable of `USERS_OWN` is set.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in USERS_OWN):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER))
