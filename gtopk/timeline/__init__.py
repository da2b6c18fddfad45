"""The timeline: what ranks did when, as traces that Chrome and Perfetto show.

timeline.py   a rank's trace
command.py    `gtopk timeline`: those of all ranks as one
"""
