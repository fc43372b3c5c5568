"""The doctor: independent checks of this machine, each with findings, their evidence and the fix."""
