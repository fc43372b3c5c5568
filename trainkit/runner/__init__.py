"""From a plan to a finished run. An edge: processes, files and terminals live here."""
