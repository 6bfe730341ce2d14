"""Starting a job: `cydistrun`, `python -m cydist.launch`, and `cydist.spawn`.

The command line is two processes. The outer one is what the user started and may kill; it
forwards signals and waits. The inner one, its child, is the parent of the workers: it starts
them, passes on what they print, and decides how the job ended. Each clears up when the other
dies, so no process of the job outlives the command:

    outer ---lifeline---> inner ---> worker 0 ---> whatever it starts
                                \\--> worker 1

Nothing here may import numpy or compiled code: a launcher starts at once.
"""
