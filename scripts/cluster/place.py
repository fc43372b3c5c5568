"""Where the cluster that was started by hand has its files."""

import os
from pathlib import Path

FOLDER = Path(os.environ.get("TRAINKIT_CLUSTER", "/tmp/trainkit-cluster"))
