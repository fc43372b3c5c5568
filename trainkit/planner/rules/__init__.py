"""What cannot work together, by subject, each with its reason and what to choose instead."""
