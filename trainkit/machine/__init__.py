"""What is true of this machine: probes gather Facts, selection picks devices from them."""
