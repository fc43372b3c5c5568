"""Bugs of one line each for the campaign `mutants`: where, what, and which tests are to catch it.

Each changes what a line means, and breaks something that the documentation promises. To add one: the line's old part
occurs once in its file, and the test is about it alone, so that it is quick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Bug(NamedTuple):
    """A line that is changed."""

    title: str
    file: str  # below trainkit/
    test: str  # below tests/, as pytest takes it: a file, or a test in it
    old: str
    new: str


# File -> the test that is to catch it -> (what the bug does, old, new).
PLANTED: Mapping[str, Mapping[str, Sequence[tuple[str, str, str]]]] = {
    "trainer/checkpoint/saving.py": {
        "trainer/test_saving.py::test_the_disk_has_a_checkpoint_before_its_name_and_its_name_before_an_old_one_goes": [
            ("the name of a checkpoint is not flushed", "flush(final.parent)", "bool(final.parent)"),
            ("the manifest is not flushed", "for path in (scratch / MANIFEST, *(", "for path in (*("),
            ("the files of a checkpoint are not flushed", "world, flushed=True)", "world, flushed=False)"),
            (
                "an old checkpoint is removed under its own name",
                'shutil.rmtree(path.rename(path.with_name(f".tmp-old-{path.name}")))',
                "shutil.rmtree(path)",
            ),
        ],
        "trainer/test_saving.py::test_as_many_of_the_newest_checkpoints_stay_as_the_recipe_says": [
            ("one checkpoint too many is kept", "[: -self._keep] if removes", "[: -self._keep - 1] if removes"),
        ],
        "trainer/test_best.py::test_the_checkpoint_of_the_lowest_loss_outlives_newer_ones": [
            ("the best checkpoint is removed", "if path != stays:", "if path:"),
        ],
        "trainer/test_saving.py::test_nothing_is_removed_through_a_link_in_the_place_of_the_checkpoints": [
            (
                "checkpoints behind a link are removed",
                "self._keep and not final.parent.is_symlink()",
                "bool(self._keep)",
            ),
        ],
        "trainer/test_saving.py::test_a_checkpoint_that_is_there_is_not_written_again": [
            (
                "a checkpoint that is there is written anew",
                "if any(gather_from_ranks((step_folder(root, step) / MANIFEST).exists(), world)):",
                "if not any(gather_from_ranks(True, world)):",
            ),
        ],
        "trainer/test_background.py::test_a_checkpoint_that_cannot_be_written_in_the_background_ends_the_run_in_words": [  # noqa: E501  a test's name
            ("what went wrong in the background is not raised", "pending.result()", "pending.exception()"),
        ],
        "trainer/test_background.py::test_a_slow_disk_does_not_hold_up_training_and_what_it_gets_is_the_state_of_its_step": [  # noqa: E501  a test's name
            (
                "nothing waits for the checkpoint on its way",
                "pending, self._on_its_way = self._on_its_way, None",
                "pending, self._on_its_way = None, None",
            ),
        ],
        "trainer/test_background.py::test_a_checkpoint_that_is_written_later_has_the_generators_states_of_its_step": [
            (
                "the generators' states are those of a later step",
                "write = partial(self._write, step, put, generator_states())",
                "write = lambda: self._write(step, put, generator_states())",
            ),
        ],
        "trainer/test_saving.py::test_what_a_killed_attempt_has_begun_goes_with_the_next_checkpoint": [
            ("what a killed attempt has begun stays for ever", "remove_tree(leftover)", "pass"),
        ],
        "trainer/test_saving.py::test_a_checkpoint_that_does_not_fit_on_the_disk_ends_the_run_in_one_line_and_leaves_the_last_one_whole": [  # noqa: E501  a test's name
            ("what cannot be finished stays for ever", "shutil.rmtree(scratch, ignore_errors=True)", "pass"),
        ],
    },
    "trainer/checkpoint/manifest.py": {
        "trainer/test_saving.py::test_the_disk_has_a_checkpoint_before_its_name_and_its_name_before_an_old_one_goes": [
            ("fsync is not called", "os.fsync(descriptor)", "pass"),
        ],
        "trainer/test_saving.py::test_a_restarted_run_goes_on_from_its_own_newest_whole_checkpoint": [
            (
                "a folder without a manifest counts as a checkpoint",
                'sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))',
                'sorted(root.glob("step-*"))',
            ),
            (
                "the oldest checkpoint is taken for the newest",
                "next(reversed(complete(root)), None)",
                "next(iter(complete(root)), None)",
            ),
        ],
        "trainer/test_saving.py::test_a_checkpoint_that_is_not_as_it_was_written_is_refused": [
            ("checksums are not compared", "if actual.get(name) != facts]", "if name not in actual]"),
            (
                "a changed manifest is believed",
                'if manifest.get("checksum", checksum(manifest)) != checksum(manifest):',
                "if not checksum(manifest):",
            ),
            (
                "a manifest leads out of its checkpoint",
                'inside = ".." not in Path(name).parts and not Path(name).is_absolute() and',
                "inside =",
            ),
        ],
    },
    "trainer/checkpoint/resuming.py": {
        "trainer/test_saving.py::test_a_restarted_run_goes_on_from_its_own_newest_whole_checkpoint": [
            (
                "a restarted run goes on from the plan's checkpoint",
                "folder = gather_from_ranks(newest(root), parts.world)[0] or folder",
                "folder = folder or gather_from_ranks(newest(root), parts.world)[0]",
            ),
        ],
        "trainer/test_saving.py::test_a_checkpoint_that_is_not_as_it_was_written_is_refused": [
            ("a damaged checkpoint is loaded", "refuse_damaged(folder, manifest, world)", "pass"),
        ],
        "trainer/test_saving.py::test_a_resumed_rank_draws_on_from_the_states_of_its_checkpoint": [
            (
                "a resumed rank draws other random numbers",
                "restore_generator_states(read_whole(generators_file(folder, world.rank)))",
                "pass",
            ),
        ],
    },
    "files.py": {
        "test_files.py": [
            ("a lock is shared", "fcntl.LOCK_EX | fcntl.LOCK_NB)", "fcntl.LOCK_SH | fcntl.LOCK_NB)"),
            ("the lock of a run is shared", "fcntl.flock(fd, fcntl.LOCK_EX)", "fcntl.flock(fd, fcntl.LOCK_SH)"),
            ("a file has its name before the disk has it", "os.fsync(fd)", "pass"),
            ("a file with a second name is written to", "if writes and found.st_nlink > 1:", "if False:"),
            ("a file of any size is read", "if len(content) > most:", "if False:"),
        ],
    },
    "machine/gpu_locks.py": {
        "runner/test_gpu_locks.py::test_who_only_looks_is_not_taken_for_a_holder": [
            (
                "who looks at a lock is taken for its holder",
                "fcntl.LOCK_SH | fcntl.LOCK_NB",
                "fcntl.LOCK_EX | fcntl.LOCK_NB",
            ),
        ],
        "runner/test_gpu_locks.py::test_the_lock_of_a_file_that_its_holder_has_just_removed_takes_no_card": [
            (
                "the lock of a removed file counts",
                "if (locked := try_lock(fd)) and is_only_name(fd, name):",
                "if locked := try_lock(fd):",
            ),
        ],
        "runner/test_gpu_locks.py::test_all_runs_take_their_cards_in_one_order": [
            ("cards are locked in any order", "for uuid in sorted(set(uuids)):", "for uuid in dict.fromkeys(uuids):"),
        ],
        "runner/test_gpu_locks.py::test_a_lock_says_who_holds_it_and_leaves_nothing_behind": [
            ("some cards stay taken where others are not free", "self.release()", "pass"),
            ("lock files stay behind", "Path(name).unlink()", "pass"),
        ],
        "runner/test_gpu_locks.py::test_a_killed_holders_name_does_not_stand_behind_the_new_one": [
            (
                "a lock keeps the end of its last holder's name",
                "os.ftruncate(fd, os.pwrite(fd, content, 0))",
                "os.pwrite(fd, content, 0)",
            ),
        ],
    },
    "runner/report/exit_status.py": {
        "runner/test_exit_status.py": [
            (
                "a rank is blamed that failed because the run was being ended",
                "if first is not None and (stop is None or first[0] <= stop.at):",
                "if first is not None:",
            ),
            ("the rank that failed last gives the exit code", "return min([*failures,", "return max([*failures,"),
            (
                "ranks that were stopped have failed by themselves",
                "if r.failed and not r.told_to_stop]",
                "if r.failed]",
            ),
            ("a signal's exit code is its number", "return Verdict(128 + stop.signal,", "return Verdict(stop.signal,"),
            ("a hang has the exit code of a kill", 'HANGED if stop.failure == "hang" else KILLED', "KILLED"),
            ("a launcher may leave its ranks alone", "if seen.abandoned:", "if False:"),
            (
                "ranks that never started are not missed",
                "if len(seen.records) < seen.expected_ranks and not (",
                "if False and not (",
            ),
            ("the end of a run is not flushed", "flush=verdict is not None", "flush=False"),
        ],
    },
    "runner/supervisor/processes.py": {
        "runner/test_cleanup.py": [
            ("who cleans up is killed at once", "passed >= TRACKER_SECONDS or not _is_tracker(pid)", "True"),
        ],
        "runner/test_processes.py": [
            ("process groups are signalled for processes", "if pid > 1:  # kill()", "if pid:  # kill()"),
            (
                "a process that has an ended one's number is signalled",
                'not in (b"Z", b"X") and fields[19].decode() == self.started',
                'not in (b"Z", b"X")',
            ),
            ("a process of another boot's record is signalled", ") and self.boot == boot_id()", ")"),
            (
                "a process that is not the run's is signalled",
                "if run_dir not in words and not _has_open(process.pid, lock):",
                "if False:",
            ),
            (
                "who has a word of trainkit's is trainkit",
                'module_of(words).partition(".")[0] != "trainkit"',
                '"trainkit" not in words',
            ),
            ("another user's process is signalled", "os.geteuid() not in (0, owner_of(process.pid))", "False"),
            ("a process that has ended is still waited for", 'if state not in "ZX":', "if state:"),
            ("a child starts with signals ignored", "number in ignore else signal.SIG_DFL", "True else signal.SIG_DFL"),
        ],
    },
    "runner/supervisor/registered_ranks.py": {
        "runner/test_registered_ranks.py": [
            (
                "a process that has an ended wrapper's number is a rank",
                "and (not LINUX or started(record.wrapper_pid) == record.wrapper_started)",
                "",
            ),
            (
                "any process that a record names is a rank",
                "is_wrapper = module_of(words) == WRAPPER and self._attempt_dir in words",
                "is_wrapper = True",
            ),
            ("what was taken for ended is alive", "_wrapper(each) in self._proved and _runs(each)", "_runs(each)"),
            ("a rank has TERM in every look", "self._stopped.add(pid)", "pass"),
            ("the descriptor of an ended rank stays registered", "self._selector.unregister(pidfd)", "pass"),
            ("a rank vanished that has just finished its record", "self._read()  # the last thing", "pass  #"),
        ],
    },
    "runner/watch/watch.py": {
        "runner/test_registered_ranks.py::test_a_process_that_only_a_record_names_is_not_looked_into": [
            ("a dump looks into a stranger", "view.record.ended is None and rank in self._alive", "True"),
            ("the descriptors of a stranger are opened", "alive=rank in alive", "alive=True"),
        ],
    },
    "runner/supervisor/cleanup.py": {
        "runner/test_cleanup.py": [
            (
                "a user's own files in shared memory are removed",
                "return {path for path in paths if OWN_NAMES.match(os.path.basename(path))}",
                "return paths",
            ),
            ("shared memory that another process uses is removed", "candidates -= _mapped(int(name))", "pass"),
            ("another user's file is removed", "if os.lstat(path).st_uid == os.getuid():", "if os.lstat(path):"),
        ],
    },
    "runner/supervisor/guardian.py": {
        "runner/test_termination.py": [
            (
                "the grace time is twice as long",
                "self.kill_at = time.monotonic() + self._grace",
                "self.kill_at = time.monotonic() + 2 * self._grace",
            ),
            (
                "a launcher may restart ranks that are being ended",
                "if launcher_runs and (idle or self._may_restart):",
                "if launcher_runs and idle:",
            ),
            (
                "a rank that its launcher has left has no grace time",
                "if ranks_alive or self._rest_since is None:",
                "if self._rest_since is None:",
            ),
        ],
    },
    "schedulers/ssh.py": {
        "schedulers/test_ssh_words.py": [
            ("an option that ssh takes out of quotes is taken for none", "([A-Za-z0-9]+)(?:", '([A-Za-z0-9\\"]+)(?:'),
            ("a dry run runs what an option names", "name.lower() in HARMLESS_OPTIONS", "True"),
            ("a dry run runs what a jump names", "or not PLAIN.fullmatch(of_it)", ""),
        ],
    },
    "schedulers/jobs/following.py": {
        "schedulers/test_run_state.py::test_another_users_plan_in_ones_own_run_says_nothing_of_what_is_done": [
            ("attach goes where another user's plan says", "hosts_of(layout, own=True)", "hosts_of(layout)"),
            (
                "save runs what another user's plan names",
                "python = str(read_plan(layout, own=True)",
                "python = str(read_plan(layout)",
            ),
        ],
        "schedulers/test_ended_jobs.py": [
            (
                "a job that is another's by now is ended",
                "if found is not None and not found.is_of(layout.id, layout.name, layout.root.stat().st_uid):",
                "if False:",
            ),
            ("a word that Slurm would not pass on stays", "if not requested_before:", "if False:"),
        ],
    },
    "schedulers/jobs/run_state.py": {
        "schedulers/test_run_state.py": [
            ("an unknown state is an end", '"requeued", "unknown")\n', '"requeued")\n'),
            ("a run that is held for its nodes is removed", " or is_being_started(layout) is not False:\n", ":\n"),
            ("another user's run is removed", "os.geteuid() not in (0, _owner(layout)) or ", ""),
            ("a job of another cluster is gone", "if (answers := self._controllers[scheduler]) == took:", "if True:"),
            ("what a run has written meanwhile is not read", 'if job.state in ("ended", "gone"):', "if False:"),
            ("a job that was queued again is over", 'elif job.state == "queued":', "elif False:"),
            (
                "a run whose job was queued again is removed",
                'return _job_after(layout, submission, jobs).state in ("ended", "gone")',
                "return True",
            ),
            ("a run on another machine is lost", "if status.host not in (None, here):", "if False:"),
            ("a damaged submission is none", "if submission is DAMAGED:", "if False:"),
            (
                "another run's job is asked for this one",
                "if not job.is_of(layout.id, layout.name, _owner(layout)):",
                "if False:",
            ),
            (
                "a job that nobody answers for is gone",
                'return JobState("unknown", str(error))',
                'return JobState("gone")',
            ),
            (
                "a run that its scheduler has ended has succeeded",
                "exit_code=job.exit_code or code,",
                "exit_code=job.exit_code,",
            ),
            (
                "a run with a failure is done",
                'word = "done" if status.exit_code == 0 else',
                'word = "done" if True else',
            ),
        ],
        "runner/test_run_directories.py": [
            ("pruning keeps one run too few", "reversed(newest_first[keep:])", "reversed(newest_first[keep - 1 :])"),
            ("pruning keeps one run too many", "reversed(newest_first[keep:])", "reversed(newest_first[keep + 1 :])"),
            ("pruning follows links", "(0, _owner(layout)) or is_linked(layout):", "(0, _owner(layout)):"),
        ],
    },
    "schedulers/jobs/submitting.py": {
        "schedulers/test_submissions_in_doubt.py": [
            (
                "an array that cannot be written down runs",
                "answer_or(scheduler.cancel(SubmittedJob(given.job, given.cluster), now=True), (), requested.environ)",
                "pass",
            ),
        ],
    },
    "schedulers/jobs/records.py": {
        "schedulers/test_records.py": [
            ("another user's run is acted on", "if os.geteuid() not in (0, owner):", "if False:"),
        ],
    },
    "schedulers/pbs.py": {
        "schedulers/test_pbs.py": [
            ("a job that PBS begins again was cancelled", "in RERUN\n", "in ()\n"),
            ("a job that PBS has deleted goes on", "if TERMINATED in comment else", "if False else"),
            (
                "a job that the server knows no more is in doubt",
                "for each in (UNKNOWN, FINISHED)):\n",
                "for each in ()):\n",
            ),
            (
                "a job that qsub took in silence is lost",
                "== argv[-1] and each != other",
                "== argv[0] and each != other",
            ),
            (
                "set-up runs on the first node alone",
                "    lines.append(token('[ ${#trainkit_task",
                "    ([]).append(token('[ ${#trainkit_task",
            ),
        ],
    },
    "schedulers/slurm.py": {
        "schedulers/test_submissions_in_doubt.py": [
            (
                "a job that is hidden, or has ended, is not found in the queue",
                '("--noheader", "--all", "--states=all",',
                '("--noheader",',
            ),
        ],
    },
    "runner/rundir/create.py": {
        "runner/test_run_directories.py::test_a_run_directory_that_is_there_is_left_alone_for_another_name": [
            ("a name that is taken is no reason for another", "except FileExistsError:", "except NotADirectoryError:"),
        ],
    },
    "runner/rundir/listing.py": {
        "runner/test_run_directories.py": [
            ("half of a removed run is a run", "remove_file(layout.plan, below=folder)", "pass"),
            (
                "a folder with a plan alone is a run",
                "return layout.plan.is_file() and layout.recipe.is_file()",
                "return layout.plan.is_file()",
            ),
            ("a run that goes on is lost", "return is_locked(layout.lock)", "return False"),
            (
                "runs of a name that is a link are removed",
                "return layout.root.is_symlink() or layout.root.parent.is_symlink()",
                "return layout.root.is_symlink()",
            ),
        ],
    },
    "trainer/models/gpt.py": {
        "trainer/test_packing.py::test_texts_in_one_sample_of_the_native_model_are_learned_as_each_alone": [
            (
                "packed texts see those before them",
                "(text[:, None, :, None] == text[:, None, None, :])",
                "(text[:, None, :, None] >= text[:, None, None, :])",
            ),
        ],
    },
    "trainer/models/hf.py": {
        "trainer/test_packing.py::test_texts_in_one_sample_of_every_type_are_learned_as_each_alone": [
            (
                "caches keep transformers from looking where texts begin",
                'if self._takes_option("use_cache") else',
                'if "use_cache" in self._takes else',
            ),
        ],
    },
    "trainer/data/source.py": {
        "trainer/test_packing.py::test_texts_in_one_sample_of_the_native_model_are_learned_as_each_alone": [
            (
                "positions go on over packed texts",
                "positions[row, first:stop] = steps[: stop - first]",
                "positions[row, first:stop] = steps[first:stop]",
            ),
            (
                "what is learned of packed texts is shifted",
                "targets[row, first:stop] = np.where(learned[1:],",
                "targets[row, first:stop] = np.where(learned[:-1],",
            ),
        ],
    },
    "trainer/data/rows.py": {
        "data/test_prepared.py::test_whole_texts_fill_samples_in_other_company_in_each_epoch_from_any_number_on": [
            ("every epoch has the same bins", '"bins", epoch, group)', '"bins", 0, group)'),
        ],
    },
    "data/packing.py": {
        "data/test_bins.py::test_it_is_best_fit_whatever_the_order": [
            ("a text is put where it does not fit", "fitting = open_rooms >> size", "fitting = open_rooms >> size - 1"),
            ("a text is put where most room is", "(fitting & -fitting).bit_length()", "fitting.bit_length()"),
        ],
        "data/test_bins.py::test_texts_have_other_neighbours_in_each_epoch": [
            ("every seed gives the same bins", "np.random.default_rng(seed)", "np.random.default_rng(0)"),
        ],
    },
    "data/prepared.py": {
        "data/test_prepared.py::test_equal_rows_are_on_one_side_and_the_split_is_that_of_the_content": [
            (
                "equal rows are trained on and evaluated on",
                'drawn[held - 1], side="right")) if held else 0',
                'drawn[held - 1], side="left")) + 1 if held else 0',
            ),
            ("the split is that of places in the file", "_mixed(tokens.keys[filled], ", "_mixed(filled, "),
            ("every seed gives the same split", "+ np.uint64(seed)", "+ np.uint64(0)"),
        ],
        "data/test_prepared.py::test_empty_rows_are_never_those_to_evaluate_on": [
            ("empty rows are evaluated on", "filled = np.unique(tokens.rows)", "filled = np.arange(count)"),
        ],
        "data/test_prepared.py::test_torn_files_are_found_and_made_anew": [
            (
                "torn data are read",
                "if all(edges(ready / name) == (size, digest)",
                "if all(edges(ready / name)[0] == size",
            ),
        ],
        "data/test_prepared.py::test_the_length_is_what_99_of_100_rows_fit_into_and_at_most_what_the_model_reads": [
            ("samples are longer than the model reads", "min(rounded, limit) if limit else", "rounded if limit else"),
        ],
    },
    "data/prepare.py": {
        "data/test_prepared_alone.py::test_what_is_taken_is_bit_equal_to_a_build_in_one_go": [
            (
                "labels of a copied file keep its own numbers",
                '[*(labels[label] for label, _ in tokens.meta["labels"]), -1]',
                '[*range(len(tokens.meta["labels"])), -1]',
            ),
        ],
        "data/test_prepared_alone.py::test_a_file_that_was_begun_row_by_row_is_not_copied_behind_that": [
            (
                "a file is copied behind the rows that were read of it",
                "if files[number] not in alone or (number == first and behind):",
                "if files[number] not in alone:",
            ),
        ],
        "data/test_prepared.py::test_a_preparation_that_is_killed_goes_on_with_what_it_has_kept": [
            ("pieces that were kept are made again", "behind if number == first else 0, None)", "0, None)"),
            ("workers outlive who has started them", "while os.getppid() == parent:", "while parent:"),
        ],
        "data/test_prepared.py::test_what_was_kept_of_a_killed_preparation_is_not_believed_where_it_is_torn": [
            (
                "torn pieces are gone on from",
                'if _end_of(scratch, name) != kept["ends"][name]:',
                'if _end_of(scratch, name) is kept["ends"]:',
            ),
        ],
        "data/test_prepared.py::test_content_that_is_replaced_in_place_under_its_old_time_is_told_apart": [
            ("old content is taken for that of today", "\\0{status.st_ctime_ns}\\0", "\\0"),
        ],
        "data/test_prepared.py::test_a_file_that_is_written_while_it_is_read_is_refused": [
            ("half a file counts as the whole", "if stamp != stamps[path]:", "if not stamp:"),
        ],
    },
    "data/ready.py": {
        "data/test_ready_ids.py::test_what_is_wrong_is_named_by_file_and_row": [
            (
                "targets are not compared with the ids",
                "if not np.array_equal(targets[0][learned], ids[learned]):",
                "if len(targets) > 2:",
            ),
            ("nulls among ids are taken for numbers", "if values.null_count:", "if values.type is None:"),
        ],
        "data/test_ready_ids.py::test_a_table_of_several_row_groups_is_read_alike_and_empty_rows_are_skipped": [
            ("rows without ids are no empty rows", ".fill_null(0)", ".fill_null(1)"),
        ],
    },
    "data/files.py": {
        "data/test_row_files.py::test_a_truncated_archive_is_one_message_that_names_it": [
            ("half of an archive is all of it", "self._frame is not None and not ended:", "self._frame is ended:"),
        ],
    },
}
BUGS = tuple(
    Bug(title, file, test, old, new)
    for file, by_test in PLANTED.items()
    for test, bugs in by_test.items()
    for title, old, new in bugs
)
