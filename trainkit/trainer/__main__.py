"""One rank of the built-in trainer: ``python -m trainkit.trainer --settings RUN_DIR/trainer.json``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainkit.errors import ExitCode, TrainingError, TrainkitError, in_words, refusal
from trainkit.files import cache_folder, publish
from trainkit.heartbeat import EVALUATION, Heartbeat, attach
from trainkit.recipe.schema import Logging
from trainkit.text import counted
from trainkit.trainer.settings import Settings, World, read_settings

# Nothing that needs torch is imported up here: a wrong settings file is answered without waiting for it.
if TYPE_CHECKING:
    import torch

    from trainkit.trainer.loop import Requests

log = logging.getLogger("trainkit.trainer")


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the settings say. A failure that can be explained is one line and exit code 1, never a traceback."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.trainer", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="trainer.json in the run directory")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    try:
        heartbeat = attach(publish)  # first of all: what hangs in the start-up is seen, too
        seen: set[int] = set()
        # The request to save would end the process until somebody listens, and start-up takes seconds.
        signal.signal(signal.SIGUSR1, lambda number, frame: seen.add(number))
        options = parser.parse_args(argv)
        settings = read_settings(options.settings, options.resume)
        world = World.from_environment(os.environ)
        configure_logging(settings.recipe.logging, world)
        return run(settings, world, seen, heartbeat)
    except TrainkitError as error:
        sys.stderr.write(in_words(error))
        return int(error.exit_code)
    except (OSError, RuntimeError, MemoryError, SystemError, ImportError) as error:
        refused = refusal(error)
        if refused is None:
            raise
        sys.stderr.write(in_words(TrainingError(refused[0], hint=refused[1])))
        return int(ExitCode.FAILED)


def configure_logging(settings: Logging, world: World) -> None:
    """Main ranks log at `level`, the others at `replica_level`; warnings and worse go to standard error."""
    main_rank = world.rank == 0 or (settings.each_node and world.local_rank == 0)
    out, err = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    out.addFilter(lambda record: record.levelno < logging.WARNING)
    err.setLevel(logging.WARNING)
    logging.basicConfig(format="%(message)s", handlers=[out, err])
    log.setLevel((settings.level if main_rank else settings.replica_level).upper())


def keep_compiled(run_dir: Path) -> None:
    """Have torch keep what it compiles in this user's cache, or in the run directory where there is none."""
    folder = cache_folder(os.environ, "inductor")
    try:
        os.makedirs(folder or "", exist_ok=True)  # noqa: PTH103 - what is not there raises too
        usable = folder if os.access(folder or "", os.W_OK) else None
    except OSError:
        usable = None
    # Its own choice is the system's temporary folder; it makes one when it is imported, whether it compiles or not.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", usable or str(run_dir / "compiled"))


def run(settings: Settings, world: World, seen: set[int], heartbeat: Heartbeat) -> int:
    """Hold the process group open around the training of this rank; the exit code as of `train_and_report`.

    seen: the signals that have come so far.
    """
    keep_compiled(settings.run_dir)  # before torch is imported
    from trainkit.trainer.distributed import device_of, process_group
    from trainkit.trainer.loop import Requests
    from trainkit.trainer.parallel import STRATEGIES
    from trainkit.trainer.parallel.swapping import swap_space

    if settings.batch.ranks != world.size:  # the batch would be another one, unseen
        raise TrainingError(
            f"the plan is for {counted(settings.batch.ranks, 'rank')}, and the launcher started {world.size}",
            hint="plan again, with nodes.count and nodes.processes_per_node as they are to be",
        )
    device = device_of(settings.device, world)
    needed = STRATEGIES[settings.recipe.strategy.kind].needs_group
    # Outermost: the engine that swaps is gone when its folder is removed.
    seconds = settings.recipe.hang.collective_seconds
    with swap_space(settings), process_group(world, device, needed=needed, seconds=seconds):
        heartbeat.listen()
        return train_and_report(settings, world, device, Requests(seen), heartbeat)


def train_and_report(
    settings: Settings, world: World, device: torch.device, requests: Requests, heartbeat: Heartbeat | None = None
) -> int:
    """Assemble, resume, train, write the result; the exit code is 0, or 128 + the signal that stopped the run."""
    from trainkit.recipe.schema.model import is_packed_stream
    from trainkit.trainer.checkpoint.resuming import resume
    from trainkit.trainer.loop import WATCHED, finish_uploads, train
    from trainkit.trainer.metrics.predictions import predict, result, write_result
    from trainkit.trainer.metrics.speed import slow_data_warning
    from trainkit.trainer.metrics.writers import Metrics
    from trainkit.trainer.setup import assemble, describe, start_record

    parts = assemble(settings, world, device, heartbeat)
    # torchrun counts how often it has started the ranks again after a failure.
    first = resume(parts, restarted=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
    log.info("%s", describe(parts))
    if world.rank == 0 and first == 0:  # a checkpoint has all weights
        for level, remark in parts.model.remarks:
            log.log(level, "%s", remark)
    requests.listen(*WATCHED)  # only now: a signal during start-up should end the process at once
    with closing(Metrics(settings.run_dir, settings.recipe.logging.report_to, main=world.rank == 0)) as metrics:
        metrics.write(start_record(parts, first))
        progress = train(parts, first, metrics, requests)
    parts.heartbeat.set_phase(EVALUATION)  # a sample, predictions
    outcome = result(parts, progress)
    if world.rank == 0:
        write_result(settings.run_dir / "result.json", outcome)
        waited, workers = (outcome["data_wait_share"], outcome["train_seconds"]), settings.recipe.data.workers
        slow = slow_data_warning(*waited, workers, packed=is_packed_stream(settings.recipe))
        if slow:
            log.warning("warning: %s", slow)
    if settings.recipe.predict.split != "none" and not progress.stopped_by:
        with parts.checkpoints.outlasting_failure():
            predict(parts)
    stopped_by = finish_uploads(parts, progress, requests)
    return 128 + stopped_by if stopped_by else 0


def start(argv: Sequence[str] | None = None) -> NoReturn:
    """Run :func:`main` and end the process without the interpreter's tear-down."""
    try:
        code = main(argv)
    except Exception:  # noqa: BLE001  # a bug: what the interpreter would do, and then the same end
        traceback.print_exc()
        code = int(ExitCode.FAILED)
    sys.stdout.flush()
    sys.stderr.flush()
    # torch 2.6 makes a temporary folder as it is imported, and leaves it to the tear-down, which never comes.
    made = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
    if made is not None:
        with suppress(OSError):
            made.cleanup()
    # Everything is closed by now, and tear-down after DeepSpeed on gloo aborts about one run in ten ("terminate called
    # without an active exception"), which would turn a finished run into a failed one.
    os._exit(code)


if __name__ == "__main__":
    start()
