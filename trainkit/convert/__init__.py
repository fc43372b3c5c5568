"""Recipes made from what other tools are started with: their command lines and their configuration files."""
