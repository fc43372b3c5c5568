"""Comparing a recipe with its variants: rows, table and plot are pure, bench runs them."""
