"""trainkit: a training launcher driven by config files."""

__version__ = "0.1.0"
