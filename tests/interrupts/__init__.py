"""SIGINT at the first hit of every line of peftc that an operation runs: the model is as before it,
or as after it.

    make interrupts                              # all lines of all operations
    python -m tests.interrupts.run fold remove   # some operations

`operations.py` has the operations, `snapshot.py` what is compared, `run.py` forks the process at
each line.
"""
