"""Runtime: it keeps ranks together, and knows neither gradients nor file formats.

coordinator/          operations matched by name across ranks: readiness, fusion, stalls
world/                init, shutdown, process sets, preemption, failure files
liveness/             heartbeats between ranks, and the process beside each rank that sends them
launch/               how mpirun, torchrun and srun start ranks, and what they tell a rank
runner/               `gtopk.run`: a function is called on ranks that are started for it
object_codec/         objects as bytes, without pickle
machine.py            the machine that figures were measured on
standard_streams.py   stdout and stderr, which may be closed, or whose reader may have stopped
logs.py               the logger, and which ranks log
"""
