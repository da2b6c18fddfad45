"""Runtime: it keeps ranks together, and knows neither gradients nor file formats.

coordinator/    operations matched by name across ranks: readiness, fusion, stalls
world/          init, shutdown, process sets, preemption, failure files
liveness/       heartbeats between ranks, and the process beside each rank that sends them
launch/         what mpirun, torchrun and srun tell a rank, and how ranks meet
runner/         `gtopk.run` and `gtopk run`
object_codec/   objects as bytes, without pickle
machine.py      cores, memory and network interfaces of this host
logs.py         the logger, and which ranks log
"""
