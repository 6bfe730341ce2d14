"""Start a job: `cydistrun`, `python -m cydist.launch`, and `cydist.spawn`.

The command runs as two processes. The outer one is the process that the user started and may kill.
It forwards signals and waits. The inner one, its child, is the parent of the workers: it starts
them, passes on their output, and decides how the job ended. Each cleans up when the other dies, so
no process of the job outlives the command:

    outer ---lifeline---> inner ---> worker 0 ---> whatever it starts
                                \\--> worker 1

Nothing here may import numpy or compiled code, so that a launcher starts at once.
"""
