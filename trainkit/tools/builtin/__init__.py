"""The built-in trainer as a tool: its command, its settings file, and every rule about it."""
