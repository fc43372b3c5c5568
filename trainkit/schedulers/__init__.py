"""Schedulers: what is submitted to them, what they answer, and which node of a job this is. Pure but for the client."""
