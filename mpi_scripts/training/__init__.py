"""What `train.py` is made of: tasks (data, loss, measure), schedules, presets, and the loop."""
