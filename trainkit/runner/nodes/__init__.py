"""A run on several nodes: they report before the start, hold a line to node 0, and end with one verdict."""
