"""A script on DeepSpeed's engine."""

import deepspeed

engine, *_ = deepspeed.initialize(model=None)
