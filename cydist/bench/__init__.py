"""The benchmark: `python -m cydist.bench`.

A *worker* is one library on a set of processes: cydist, or a peer. Its own launcher starts it once,
and it sleeps until the driver tells it to run a *case*, one op at one size. The driver goes through
the workers round by round, so that disturbances of the machine affect all of them, and a comparison
is a ratio within one round.

    driver (runner, workers, report) ---unix socket--- rank, rank, ...

`rank`, `rank_loop`, `buffers`, `peers` and `cases` run in the ranks, also under an MPI whose Python
has no cydist: they import numpy and the standard library, and their library when it is needed.
"""
