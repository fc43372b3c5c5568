"""The built-in trainer: the program of each rank, and the only room that needs torch.

To read it: `__main__` starts a rank, `setup` builds the parts of a run, `loop` trains, `checkpoint/` saves and resumes.
"""
