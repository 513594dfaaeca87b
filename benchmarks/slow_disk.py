"""A disk of a given speed: a library for LD_PRELOAD that makes each write to a file last as long as there.

A cgroup's `io.max` would need a disk of its own, and root.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from mpiddp.errors import UserError

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static ssize_t slowly(int file, ssize_t written) {
    struct stat found;
    if (written > 0 && fstat(file, &found) == 0 && S_ISREG(found.st_mode)) {
        long long ns = written * 1000LL / MB_PER_S;
        struct timespec pause = {ns / 1000000000, ns % 1000000000};
        nanosleep(&pause, NULL);
    }
    return written;
}

#define SLOW(name, parameters, ...) \
    ssize_t name parameters { \
        static ssize_t (*real) parameters; \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        return slowly(file, real(__VA_ARGS__)); \
    }
SLOW(write, (int file, const void *from, size_t size), file, from, size)
SLOW(writev, (int file, const struct iovec *from, int count), file, from, count)
SLOW(pwrite, (int file, const void *from, size_t size, off_t at), file, from, size, at)
SLOW(pwrite64, (int file, const void *from, size_t size, off64_t at), file, from, size, at)
"""


def build(folder: Path, mb_per_s: int) -> Path:
    """Compile the library into the folder, and return its path.

    Raises:
        UserError: there is no C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise UserError("--disk-mb-per-s compiles a library, and no cc is on PATH. Install gcc.")
    source, library = folder / "slow_disk.c", folder / "slow_disk.so"
    source.write_text(_SOURCE)
    options = ("-O2", "-shared", "-fPIC", f"-DMB_PER_S={mb_per_s}", "-o", str(library), str(source))
    subprocess.run([compiler, *options, "-ldl"], check=True, timeout=60)
    return library
