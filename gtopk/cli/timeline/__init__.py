"""The timeline: what ranks did when, as traces that Chrome and Perfetto show.

command.py    `gtopk timeline`: the traces of all ranks as one; telemetry/timeline.py writes them
"""
