"""The world: this process's place among the ranks, from joining them to leaving them.

joining.py            from the launcher's variables, or mpi4py's communicators, to a transport
membership.py         World: a rank's transport, engine and place; what carries its GPU's messages
world.py              the World of this process, from init to shutdown
process_sets.py       some of the ranks, with operations of their own
guard.py              when one rank fails, the job ends with its number, step and error
preemption.py         SIGTERM on one rank: all know after the same step
"""
