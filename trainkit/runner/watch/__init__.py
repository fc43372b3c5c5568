"""The hang watch: whether a run moves, and which rank blocks it if it does not."""
