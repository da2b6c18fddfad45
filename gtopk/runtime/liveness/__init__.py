"""Heartbeat: each rank has a companion process that tells the others how the rank is.

     rank 0       rank 1       rank 2        between ranks: MPI, gloo, ...
       |            |            |           pipes: who is lost; that the rank leaves
    companion -- companion -- companion      UDP: beats, signed with a secret of the job

A process of its own, because a rank may hold Python's lock for long (a large unpickling, a
compilation) and is not dead for that: a companion beats on, and looks whether its rank is stopped
or has ended. Nothing of torch, MPI or the rest of gtopk is loaded in it.

    what befalls a rank                     what the others know of it
    stopped (SIGSTOP, a debugger)           at once; a loss after the timeout
    its host or its link is gone            that it is silent; a loss after the timeout
    ended, without having left              at once, with the reason if it could give one
    computes for long, Python's lock held   nothing: it is alive
"""
