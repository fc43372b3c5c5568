"""From a plan to a finished run: the only room that starts processes and writes run directories."""
