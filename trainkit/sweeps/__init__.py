"""Sweeps: one run for each point of a space of settings, on Optuna, and which of them is the best."""
