"""CPU memory over MPI: the backend "mpi", on mpi4py.

Ranks of one host use memory that they share, as those of "tcp" do, and MPI carries the rest: its
own collectives where it has them with our meaning, our algorithms over its messages elsewhere.
mpi4py starts MPI and makes communicators; what moves data is compiled
(src/transports/mpi/mpi_link.pyx).
Nothing here touches the user's own traffic: all of it is on communicators of ours.
"""
