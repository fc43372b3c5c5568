"""Engines that start an image: their words in front of the launcher, and commands of theirs as a recipe."""
