"""CPU memory over MPI: the backend "mpi", on mpi4py.

Ranks of one host use shared memory, as those of "tcp" do. MPI carries the rest: through its own
collectives if they have cydist's semantics, else through cydist's algorithms over MPI's messages.
mpi4py starts MPI and makes communicators; compiled code moves data
(src/transports/mpi/mpi_link.pyx). The user's own traffic is not affected, because cydist uses its
own communicators.
"""
