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

from trainkit.errors import ExitCode, TrainingError, TrainkitError, one_line_each, refusal
from trainkit.files import cache_folder, publish
from trainkit.heartbeat import EVALUATION, Heartbeat, attach
from trainkit.recipe.schema import Logging
from trainkit.text import pluralize
from trainkit.trainer.settings import Settings, World, read_settings

# torch is not imported at the top, so that a wrong settings file is reported without waiting for it.
if TYPE_CHECKING:
    import torch

    from trainkit.trainer.loop import SignalRequests

log = logging.getLogger("trainkit.trainer")


def main(argv: Sequence[str] | None = None) -> int:
    """Train with the settings. An expected failure gives one line and exit code 1, never a traceback."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.trainer", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="trainer.json in the run directory")
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    try:
        heartbeat = attach(publish)  # first, so that a hang during the start-up is seen too
        seen: set[int] = set()
        # Until a handler is set, a request to save would end the process, and the start-up takes seconds.
        signal.signal(signal.SIGUSR1, lambda number, frame: seen.add(number))
        options = parser.parse_args(argv)
        settings = read_settings(options.settings, options.resume)
        world = World.from_environment(os.environ)
        configure_logging(settings.recipe.logging, world)
        return run(settings, world, seen, heartbeat)
    except TrainkitError as error:
        sys.stderr.write(one_line_each(error))
        return int(error.exit_code)
    except (OSError, RuntimeError, MemoryError, SystemError, ImportError) as error:
        refused = refusal(error)
        if refused is None:
            raise
        sys.stderr.write(one_line_each(TrainingError(refused[0], hint=refused[1])))
        return int(ExitCode.FAILED)


def configure_logging(settings: Logging, world: World) -> None:
    """Main ranks log at `level`, the others at `replica_level`; warnings and errors go to standard error."""
    main_rank = world.rank == 0 or (settings.each_node and world.local_rank == 0)
    out, err = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    out.addFilter(lambda record: record.levelno < logging.WARNING)
    err.setLevel(logging.WARNING)
    logging.basicConfig(format="%(message)s", handlers=[out, err])
    log.setLevel((settings.level if main_rank else settings.replica_level).upper())


def keep_compiled(run_dir: Path) -> None:
    """Have torch cache compiled code in the user's cache folder, or in the run directory if there is none."""
    folder = cache_folder(os.environ, "inductor")
    try:
        os.makedirs(folder or "", exist_ok=True)  # noqa: PTH103 - what is not there raises too
        usable = folder if os.access(folder or "", os.W_OK) else None
    except OSError:
        usable = None
    # By default torch uses a temporary folder, which it creates on import even if it never compiles.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", usable or str(run_dir / "compiled"))


def run(settings: Settings, world: World, seen: set[int], heartbeat: Heartbeat) -> int:
    """Open the process group, train, close it; the exit code is that of `train_and_report`.

    seen: the signals received so far.
    """
    keep_compiled(settings.run_dir)  # before torch is imported
    from trainkit.trainer.distributed import device_of, process_group
    from trainkit.trainer.loop import SignalRequests
    from trainkit.trainer.parallel import STRATEGIES
    from trainkit.trainer.parallel.swapping import swap_space

    if settings.batch.ranks != world.size:  # otherwise the batch would silently have another size
        raise TrainingError(
            f"the plan is for {pluralize(settings.batch.ranks, 'rank')}, and the launcher started {world.size}",
            hint="plan again with the right nodes.count and nodes.processes_per_node",
        )
    device = device_of(settings.device, world)
    needed = STRATEGIES[settings.recipe.strategy.kind].needs_group
    # Outermost, so that the swapping engine is gone when its folder is removed.
    seconds = settings.recipe.hang.collective_seconds
    with swap_space(settings), process_group(world, device, needed=needed, seconds=seconds):
        heartbeat.listen()
        return train_and_report(settings, world, device, SignalRequests(seen), heartbeat)


def train_and_report(
    settings: Settings, world: World, device: torch.device, requests: SignalRequests, heartbeat: Heartbeat | None = None
) -> int:
    """Assemble, resume, train, write the result; the exit code is 0, or 128 + the signal that stopped the run."""
    from trainkit.data.formats import is_packed_stream
    from trainkit.trainer.checkpoint.resuming import resume
    from trainkit.trainer.loop import WATCHED, finish_uploads, train
    from trainkit.trainer.metrics.predictions import predict, result, write_result
    from trainkit.trainer.metrics.speed import slow_data_warning
    from trainkit.trainer.metrics.writers import Metrics, check_reporters
    from trainkit.trainer.setup import assemble, describe, start_record

    report_to = settings.recipe.logging.report_to
    if world.rank == 0:  # before the model is built for nothing
        check_reporters(settings.run_dir, report_to)
    parts = assemble(settings, world, device, heartbeat)
    # torchrun counts here how often it has restarted the ranks after a failure.
    first = resume(parts, restarted=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
    log.info("%s", describe(parts))
    if world.rank == 0 and first == 0:  # a checkpoint has all weights
        for level, remark in parts.model.remarks:
            log.log(level, "%s", remark)
        for remark in parts.source.remarks:
            log.warning("warning: %s", remark)
    requests.listen(*WATCHED)  # only now, so that a signal during the start-up ends the process at once
    known = parts.checkpoints.reporters
    with closing(Metrics(settings.run_dir, report_to, main=world.rank == 0, known=known)) as metrics:
        parts.checkpoints.reporters = {name: each["id"] for name, each in metrics.runs.items()}
        metrics.write(start_record(parts, first))
        progress = train(parts, first, metrics, requests)
        parts.heartbeat.set_phase(EVALUATION)  # a sample, predictions
        # Before the reporters are closed: sending the rest may take a while, and is no time of the training.
        outcome = {**result(parts, progress), "reporters": metrics.runs}
        if world.rank == 0:
            write_result(settings.run_dir / "result.json", outcome)
    if world.rank == 0:
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
    """Run :func:`main`, then end the process without the interpreter's shutdown."""
    try:
        code = main(argv)
    except Exception:  # noqa: BLE001  # a bug: what the interpreter would do, and then the same end
        traceback.print_exc()
        code = int(ExitCode.FAILED)
    sys.stdout.flush()
    sys.stderr.flush()
    # torch 2.6 creates a temporary folder on import and removes it at the interpreter's shutdown, which is skipped
    # here.
    made = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
    if made is not None:
        with suppress(OSError):
            made.cleanup()
    # Everything is closed here, and a shutdown after DeepSpeed on gloo aborts about one run in ten ("terminate called
    # without an active exception"), which would turn a finished run into a failed one.
    os._exit(code)


if __name__ == "__main__":
    start()
