"""CPU memory over MPI: the backend "mpi", on mpi4py.

Ranks of one host use shared memory, as those of "tcp" do. MPI carries the rest: through its own
collectives where they mean the same as cydist's, else through cydist's algorithms over its
messages. mpi4py starts MPI and makes communicators; what moves data is compiled
(src/transports/mpi/mpi_link.pyx). The user's own traffic is untouched, because everything here uses
communicators of its own.
"""
