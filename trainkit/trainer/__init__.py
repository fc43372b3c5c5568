"""The built-in trainer: what runs in the workers, and the only place that needs torch."""
