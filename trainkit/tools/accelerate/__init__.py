"""What is special about programs built on `Accelerator()`: settings that reach it through its environment."""
