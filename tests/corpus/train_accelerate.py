"""A script on Accelerator()."""

from accelerate import Accelerator

accelerator = Accelerator()
