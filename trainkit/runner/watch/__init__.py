"""Whether a run still moves: when it does not, who holds it up and where, before anything is ended."""
