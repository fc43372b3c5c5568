"""The checks, by subject; each is listed in `doctor/examine.py`."""
