"""Trace a micro step on the meta device, without memory and without a GPU: what `trainkit.foresight` reads."""
