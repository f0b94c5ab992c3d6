"""C code compiled on first use with the machine's C compiler.

Everything that runs in compiled code has a plain form in torch, which takes over where there is no
compiler, where compiling fails, or where `TORCHDYNAMO_DISABLE=1` asks for no compilation.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

FLAGS: tuple[str, ...] = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS += ("-mprefer-vector-width=512",)


def allowed() -> bool:
    """Whether nobody has asked for a run without compilation."""
    return os.environ.get("TORCHDYNAMO_DISABLE") != "1"


@functools.cache
def load(source: str, purpose: str) -> ctypes.CDLL | None:
    """The functions of a C file; None, said once with what it is for, where compiling fails."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        logger.info("no C compiler: %s runs without compiled code, slower", purpose)
        return None
    error: Exception | None = None
    for openmp in ("-fopenmp", "-fopenmp-simd"):
        try:
            return _build(compiler, source, openmp)
        except (OSError, subprocess.SubprocessError) as problem:
            error = problem
    logger.info("compiling failed (%s): %s runs without, slower", error, purpose)
    return None


def _build(compiler: str, source: str, openmp: str) -> ctypes.CDLL:
    """Compile and load; raises OSError or SubprocessError where that fails.

    No OpenMP runtime is linked: its symbols come from the one that torch has loaded, so that there
    is one pool of threads and `torch.set_num_threads` holds. Where torch's is another kind, loading
    fails, and the caller builds without threads.
    """
    with tempfile.TemporaryDirectory(prefix="groundlm-") as folder:
        source_file, built = Path(folder, "code.c"), Path(folder, "code.so")
        source_file.write_text(source)
        for command in (
            [compiler, *FLAGS, openmp, "-c", "-o", f"{built}.o", str(source_file)],
            [compiler, "-shared", "-o", str(built), f"{built}.o", "-lm"],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        return ctypes.CDLL(str(built), mode=os.RTLD_NOW)
