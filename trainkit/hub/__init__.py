"""Repositories of the Hugging Face Hub that a recipe names in place of folders: found, fetched once, pinned."""
