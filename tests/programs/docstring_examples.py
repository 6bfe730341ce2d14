"""A rank that runs the examples of all public docstrings, each on both ranks of a job.

In an example `np` is numpy, `dist` is cydist and `rank` this rank's number.
"""

import doctest
import inspect
import sys

import numpy as np
from public_names import public

import cydist as dist

dist.init_process_group("tcp", timeout=30)
names = {"np": np, "dist": dist, "rank": dist.get_rank()}
parser, runner, seen = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False), set()
for name, found in public():
    text = inspect.getdoc(found) or ""
    if text not in seen:  # two names of one function have one example
        seen.add(text)
        runner.run(parser.get_doctest(text, dict(names), name, None, 0))
print(f"{runner.tries} lines of examples, {runner.failures} failed")
dist.destroy_process_group()
sys.exit(runner.failures > 0)
