"""Runtime: keeps the ranks together. It knows neither gradients nor file formats.

coordinator/          operations matched by name across ranks: readiness, fusion, stalls
world/                init, shutdown, process sets, preemption, failure files
liveness/             heartbeats between ranks, sent by a companion process beside each rank
launch/               start ranks, and read the variables that mpirun, torchrun and srun set
runner/               `gtopk.run`: call a function on newly started ranks
object_codec/         objects as bytes, without pickle
machine.py            description of the machine that a measurement ran on
standard_streams.py   stdout and stderr that may be closed or blocked
logs.py               the logger, and which ranks print what
"""
