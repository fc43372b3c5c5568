"""Data: what the samples are, and the order in which every rank sees them."""
