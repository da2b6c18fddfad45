"""Heartbeat: each rank has a companion process that reports the rank's state to the others.

     rank 0       rank 1       rank 2        between ranks: MPI, gloo, ...
       |            |            |           pipes: lost ranks; that the rank leaves
    companion -- companion -- companion      UDP: beats, signed with a secret of the job

The companion is a separate process, because a living rank may hold Python's lock for long (a large
unpickling, a compilation). Meanwhile the companion keeps sending beats, and checks whether its rank
is stopped or has ended. It loads nothing of torch, MPI or the rest of gtopk.

    a rank                                  the others
    is stopped (SIGSTOP, a debugger)        know at once; it is lost after the timeout
    loses its host or its link              notice its silence; it is lost after the timeout
    ends without having left                know at once, with the reason if it could give one
    computes for long, Python's lock held   notice nothing: it is alive

heartbeat.py   the rank's side: starts the companion, receives reports of lost ranks, and chooses
               the address at which this host receives beats
companion.py   the process: sends beats, including a last one when its rank has ended
watch.py       decides which ranks are lost, from received and missing beats
watchdog.py    before the companion starts: ends a start that takes too long or cannot succeed any
               more; reads processes from /proc
world/guard.py handles the loss of another rank.
"""
