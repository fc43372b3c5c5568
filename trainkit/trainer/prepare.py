"""Prepare a run's data before its ranks start: ``python -m trainkit.trainer.prepare --settings …/trainer.json``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainkit.errors import ExitCode, TrainingError, TrainkitError, one_line_each
from trainkit.files import parse_json
from trainkit.trainer.settings import Settings, read_settings

SHARE, DONE = "share.json", "done"  # of a task, in its folder


def main(argv: Sequence[str] | None = None) -> int:
    """Make token ids of the rows, unless they are there. Exit code 2: the rows cannot be learned from."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.trainer.prepare", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="trainer.json in the run directory")
    parser.add_argument("--show", type=int, help="describe the data, with so many rows as text")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--colour", action="store_true", help="in colours")
    parser.add_argument("--list", action="store_true", help="only name the files, and the folder of what is prepared")
    parser.add_argument("--share", action="store_true", help=f"only the files of {SHARE} beside the settings")
    options = parser.parse_args(argv)
    try:
        settings = read_settings(options.settings)
        from trainkit.data.prepare import files_and_cache, prepare, prepared_already
        from trainkit.data.report import as_json, described, page, remarks

        if options.list:
            files, cache = files_and_cache(settings.recipe)
            _say(json.dumps({"files": [str(each) for each in files], "cache": cache and os.path.abspath(cache)}))  # noqa: PTH100 - links and all
            return 0
        if options.share and not _is_last_share(settings):
            return 0
        if options.show is None and prepared_already(settings.recipe, settings.run_dir):
            return 0
        say = _say if options.show is None else _progress
        prepared, found, encoder, names = prepare(settings.recipe, settings.run_dir, os.environ, say)
        if options.show is not None:
            if options.json:
                _say(json.dumps(as_json(prepared, found.files, encoder, names, options.show), indent=2))
            else:
                _say(page(prepared, found.files, encoder, names, options.show, colour=options.colour))
            return 0
        _say(described(prepared, encoder, names))
        for each in remarks(prepared, encoder, names):
            _say(f"warning: {each}")
    except TrainkitError as error:
        sys.stderr.write(one_line_each(error))
        return int(ExitCode.USAGE)
    return 0


def _is_last_share(settings: Settings) -> bool:
    """Prepare the files of one of several tasks; whether those of the others are prepared, too."""
    from trainkit.data.prepare import prepare_files

    share = parse_json((settings.run_dir / SHARE).read_bytes())
    if not Path(share["mark"]).exists():
        what = f"this node does not see {share['mark']}, which was made where the job was submitted"
        raise TrainingError(what, hint="set data.cache to a folder that all nodes share")
    prepare_files(settings.recipe, [Path(each) for each in share["files"]], os.environ, _say)
    (settings.run_dir / DONE).touch()
    tasks = [settings.run_dir.with_name(f"task-{number}") for number in range(share["tasks"])]
    if all((each / DONE).exists() for each in tasks):
        Path(share["mark"]).unlink(missing_ok=True)
        return True
    return False


def _progress(line: str) -> None:
    sys.stderr.write(f"preparing: {line}\n")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
