"""A run as it is watched: read from outside, drawn in a terminal, never touched."""
