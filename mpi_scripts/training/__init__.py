"""The parts of `train.py`: tasks (data, loss, measure), schedules, presets, and the loop."""
