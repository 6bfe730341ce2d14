"""Measuring: `python -m cydist.bench`.

A *participant* is one library on a set of processes: cydist, or a peer. It is started once, by
its own launcher, and then sleeps until the driver tells it to run a *cell*, one op at one size.
The driver goes through the participants round by round, so that what the machine does to one
it does to all, and a comparison is a ratio inside one round.

    driver (participants, rounds, report) ---unix socket--- rank, rank, ...

`rank`, `loops`, `buffers`, `libraries` and `cells` run in the ranks, also under an MPI whose
Python has no cydist: they import numpy and the standard library, and their library when it is
asked for.
"""
