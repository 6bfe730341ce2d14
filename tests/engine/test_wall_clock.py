"""Nothing depends on the wall clock, which jumps."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALL = {
    ("time", "time"), ("time", "time_ns"), ("time", "ctime"), ("time", "localtime"),
    ("time", "gmtime"), ("time", "strftime"), ("datetime", "now"), ("datetime", "utcnow"),
    ("datetime", "today"), ("date", "today"),
}  # fmt: skip
# Where people read it, and nothing waits for it.
ALLOWED = {"cydist/bench/sysinfo.py", "cydist/recorder/snapshot.py"}
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "cydist").rglob("*.py"))


def looks_at_the_wall_clock(source: str) -> list[int]:
    """The lines that name a function of the wall clock."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if (name, node.attr) in WALL:
                found.append(node.lineno)
        if isinstance(node, ast.ImportFrom):
            found += [node.lineno for name in node.names if (node.module, name.name) in WALL]
    return found


def test_no_module_looks_at_the_wall_clock() -> None:
    """Deadlines are on time.monotonic()."""
    looks = {each: looks_at_the_wall_clock((ROOT / each).read_text()) for each in MODULES}
    assert {each for each, lines in looks.items() if lines} - set(ALLOWED) == set()


@pytest.mark.parametrize(
    "source", ["import time\ntime.time()", "from time import time", "datetime.datetime.now()"]
)
def test_a_look_at_the_wall_clock_is_seen(source: str) -> None:
    """In every spelling."""
    assert looks_at_the_wall_clock(source)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "src").rglob("*.pyx")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_compiled_code_knows_one_clock(path: Path) -> None:
    """CLOCK_MONOTONIC, also for the condition variables."""
    source = path.read_text()
    for word in ("CLOCK_REALTIME", "gettimeofday", "libc.time", "time("):
        assert f" {word}" not in source.replace("posix.time", "")


# Every look at the wall clock jumps, an hour ahead and an hour back in turn.
JUMPS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static int looks;

static time_t jump(void) {
    return __atomic_add_fetch(&looks, 1, __ATOMIC_RELAXED) % 2 ? 3600 : -3600;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, t);
    if (clock == CLOCK_REALTIME) t->tv_sec += jump();
    return status;
}

time_t time(time_t *into) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (into) *into = t.tv_sec;
    return t.tv_sec;
}

int gettimeofday(struct timeval *restrict into, void *restrict zone) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    into->tv_sec = t.tv_sec;
    into->tv_usec = t.tv_nsec / 1000;
    return 0;
}
"""
PROGRAM = """
import time
import numpy as np
import cydist as dist

looks = [time.time() for _ in range(4)]
assert abs(looks[1] - looks[0]) > 7000 < abs(looks[3] - looks[2]), looks

dist.init_process_group("tcp", timeout=40)
rank = dist.get_rank()
store = dist.HashStore()

def lasts(seconds, error, call):
    started = time.monotonic()
    try:
        call()
    except error:
        waited = time.monotonic() - started
        assert seconds <= waited < 30, waited
    else:
        raise AssertionError("no timeout")

for _ in range(100):
    x = np.ones(1000)
    dist.all_reduce(x)
    assert x[0] == 2
    dist.all_reduce(x, async_op=True).wait(30)
lasts(0.2, dist.StoreTimeoutError, lambda: store.wait(["never"], 0.2))
group = dist.new_group([0, 1])
dist.barrier()
if rank == 0:
    lasts(0.2, dist.DistTimeoutError, lambda: dist.all_reduce(x, group=group, timeout=0.2))
    lasts(0.2, dist.DistTimeoutError, lambda: dist.irecv(x, 1).wait(0.2))
dist.barrier()
dist.monitored_barrier(timeout=30)
print("well", rank)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, transport: str) -> None:
    """A whole job under cydistrun: meeting, calls, timeouts, leaving."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    assert compiler, "a C compiler has built cydist; it is needed here too"
    source, library, program = (tmp_path / name for name in ("j.c", "j.so", "program.py"))
    source.write_text(JUMPS)
    program.write_text(PROGRAM)
    build = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(build, check=True, timeout=50)
    done = subprocess.run(
        [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", str(program)],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stdout + done.stderr
    assert 2 == done.stdout.count("well"), done.stdout
