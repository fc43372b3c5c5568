"""Export a checkpoint in a process of its own: ``python -m trainkit.trainer.checkpoint``."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # to import torch takes seconds, and Ctrl-C would leave its traceback
    from trainkit.trainer.checkpoint.export import main

    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on what is half written goes
    sys.exit(main())
