"""Start a job: `cydistrun`, `python -m cydist.launch`, and `cydist.spawn`.

The command runs as three processes. The outer one is the process that the user started and may
kill. It forwards signals and waits. The inner one is the parent of the workers: it starts them,
passes on their output, and decides how the job ended. Between them is the guard, which only waits.
Each ends the job when the others die, so no process of the job outlives the command:

    outer ---> guard ---> inner ---> worker 0 ---> whatever it starts
        \\-----lifeline----/     \\--> worker 1

Nothing here may import numpy or compiled code, so that a launcher starts at once.
"""
