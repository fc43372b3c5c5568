"""The built-in trainer: what runs in the workers, and the only place that needs torch.

To read it: `__main__` starts a rank, `setup` builds the parts of a run, `loop` trains, `checkpoint/` saves and resumes.
"""
