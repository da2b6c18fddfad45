"""Simulation: real models, gradients and collectives; the seconds are modelled."""
