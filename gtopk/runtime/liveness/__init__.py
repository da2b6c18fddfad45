"""Heartbeat: each rank has a companion process that tells the others how the rank is.

     rank 0       rank 1       rank 2        between ranks: MPI, gloo, ...
       |            |            |           pipes: who is lost; that the rank leaves
    companion -- companion -- companion      UDP: beats, signed with a secret of the job

The companion is a separate process, because a living rank may hold Python's lock for long (a large
unpickling, a compilation): the companion goes on sending beats, and checks whether its rank is
stopped or has ended. Nothing of torch, MPI or the rest of gtopk is loaded in it.

    a rank                                  the others
    is stopped (SIGSTOP, a debugger)        know at once; it is lost after the timeout
    loses its host or its link              notice its silence; it is lost after the timeout
    ends, without having left               know at once, with the reason if it could give one
    computes for long, Python's lock held   notice nothing: it is alive

heartbeat.py   the rank's side: starts the companion, and learns from it which ranks are lost; where
               this host receives beats
companion.py   the process: sends beats, also a last one when its rank has ended
watch.py       which ranks are lost, by the beats that came or did not
watchdog.py    before there is a companion: ends a start that takes too long, or cannot succeed any
               more; processes as /proc shows them
What a rank does when another is lost is in world/guard.py.
"""
