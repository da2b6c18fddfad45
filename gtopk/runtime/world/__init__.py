"""The world: this process's place among the ranks, from init to shutdown.

joining.py            connects the ranks: from launcher variables or mpi4py to a transport
membership.py         World: a rank's transport, engine and place; which transport serves its GPU
world.py              this process's World, from init to shutdown
process_sets.py       subsets of the ranks with operations of their own
guard.py              when a rank fails, ends the job with that rank's number, step and error
preemption.py         SIGTERM on one rank: all ranks learn of it after the same step
"""
