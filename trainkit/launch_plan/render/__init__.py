"""Renderers: pure functions from a plan to text. Each module has a `render`."""
