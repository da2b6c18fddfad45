"""The world: this process's place among the ranks, from joining them to leaving them.

joining.py            from what the launcher says to a transport
communicators.py      the same from mpi4py's communicators
gpu_messages.py       whether NCCL may carry what GPUs send
state.py              what a rank has of the job: its transport, its engine, where it sits
world.py              the world of this process, from init to shutdown
process_sets.py       some of the ranks, with operations of their own
guard.py              whatever ends one rank ends all, by name
preemption.py         SIGTERM on one rank: all know after the same step
"""
