"""A rank that beats: rewrites <folder>/beat-<rank> many times a second, holding shared memory and a background child.

heartbeat.py FOLDER [--ignore-term | --slow-term] [--exit-at BEAT CODE RANK] [--once]
"""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

folder, flags = Path(sys.argv[1]), sys.argv[2:]
rank = os.environ.get("RANK", "0")
restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
if "--ignore-term" in flags:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_slowly(*_: object) -> None:
    """Say that TERM has come, and end after half a second."""
    (folder / f"told-{rank}").touch()
    time.sleep(0.5)
    memory.close()
    memory.unlink()
    os._exit(0)


if "--slow-term" in flags:
    signal.signal(signal.SIGTERM, end_slowly)
signal.signal(signal.SIGUSR1, lambda *_: (folder / f"checkpoint-{rank}").write_text("asked for"))

memory = SharedMemory(create=True, size=4096)
(folder / f"shared-memory-{rank}").write_text(memory.name)
# A session of its own: nothing that signals groups would find it.
subprocess.Popen(["sleep", "300"], start_new_session=True)

beat = 0
while True:
    scratch = folder / f".beat-{rank}"
    scratch.write_text(f"{beat} {restart}")
    scratch.replace(folder / f"beat-{rank}")
    beat += 1
    if "--exit-at" in flags:
        at = flags.index("--exit-at")
        if beat == int(flags[at + 1]) and rank == flags[at + 3] and not ("--once" in flags and restart != "0"):
            sys.exit(int(flags[at + 2]))
    if "--stop-at" in flags and beat == int(flags[flags.index("--stop-at") + 1]):
        memory.close()
        memory.unlink()
        break
    time.sleep(0.05)
