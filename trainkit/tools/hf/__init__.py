"""What a plan knows of transformers' Trainer: its settings by version, and how the recipe becomes them."""
