"""CPU memory over TCP and shared memory: the backends "tcp" and "inproc", on which others build."""
