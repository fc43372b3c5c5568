"""Waits until a file `go` is in the folder of its first argument, then exits with the code of its second."""

import sys
import time
from pathlib import Path

end = time.monotonic() + 60
while not Path(sys.argv[1], "go").exists() and time.monotonic() < end:
    time.sleep(0.02)
sys.exit(int(sys.argv[2]))
