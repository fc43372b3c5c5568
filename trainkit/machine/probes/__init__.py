"""Probes: each module finds out one part of a machine's facts."""
