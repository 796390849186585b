"""Run folders: what is in them, two at once, a kill in the middle, a full disk."""

import errno
import importlib.util
import json
import math
import os
import signal
import struct
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.errors import RunError, UserError
from megarl.observe import RunFolder
from megarl.observe.curve import draw_curve
from megarl.observe.files import JsonLines, to_json, trouble, write_whole
from megarl.observe.report import load


def test_a_folder_has_one_run_at_a_time(tmp_path):
    first = RunFolder.create(tmp_path, "a", "")
    with pytest.raises(UserError, match="is the folder of a run that is going on"):
        RunFolder(first.path)
    first.close()
    RunFolder(first.path).close()


def test_a_run_that_goes_on_forgets_what_came_later_and_nothing_else(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "run: {steps: 3}\n", tensorboard=False)
    for step in (1, 2, 3):
        folder.add_step(step, {"x": step})
    folder.close()
    folder.write_summary({"status": "finished"})  # it is not any more, and a kill from here on must not leave it said
    lines = (folder.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder.path / "metrics.jsonl").write_bytes(
        lines[0] + b"{half a line of somebody's\n" + b"".join(lines[1:]) + b'{"ste'
    )
    again = RunFolder(folder.path, tensorboard=False)
    assert [row["step"] for row in again.go_on(2, "run: {steps: 4}\n")] == [1, 2]
    assert not (folder.path / "summary.json").exists()
    again.add_step(3, {"x": 33})
    again.close()
    kept = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert len(kept) == 4 and "somebody" in kept[1] and kept[3] == '{"step": 3, "x": 33}'
    assert (folder.path / "config.until-step-2.yaml").read_text() == "run: {steps: 3}\n"


def test_a_folder_holds_settings_versions_metrics_samples_and_events(tmp_path):
    folder = RunFolder.create(tmp_path / "new" / "runs", "a", "run: {steps: 3}\n")
    for step in range(3):
        folder.add_step(step, {"reward/mean": np.float32(0.5), "actor/loss": torch.tensor(2.0), "x": math.nan})
    folder.add_samples(
        [{"step": 0, "response": "é\n\ud800", "reward": 1.0}, {"step": 0, "response": "b", "reward": 0.0}]
    )
    folder.write_summary({"steps": 3})
    folder.close()
    names = {path.name for path in folder.path.iterdir()}
    written = {"config.yaml", "versions.json", "metrics.jsonl", "samples.jsonl", "summary.json", "tensorboard"}
    assert names == written | {".lock"}
    report = load(folder.path)
    assert report.steps == [0, 1, 2] and report.metrics["actor/loss"] == [2.0] * 3
    assert report.samples[0]["response"] == "é\n?"
    assert report.config == "run: {steps: 3}\n"
    assert report.versions["torch"] == torch.__version__.split("+")[0] or report.versions["torch"] == torch.__version__
    assert {"python", "megarl", "commit", "cores"} <= report.versions.keys()
    assert next(path.name for _, path in folder.places()) == "summary.json"


def test_event_files_are_what_tensorboard_reads(tmp_path):
    """Read back by the format alone: lengths, masked checksums, protocol buffers."""
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import masked_crc32c

    folder = RunFolder.create(tmp_path, "a", "")
    folder.add_step(7, {"reward/mean": 0.25, "actor/loss": math.nan, "note": "text"})
    folder.add_step(8, {"reward/mean": 0.5})
    (events,) = (folder.path / "tensorboard").iterdir()
    data, found = events.read_bytes(), []
    while data:
        length = struct.unpack("<Q", data[:8])[0]
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked_crc32c(body)
        found.append(event_pb2.Event.FromString(body))
        data = data[16 + length :]
    assert found[0].file_version == "brain.Event:2"
    points = [(event.step, value.tag, value.simple_value) for event in found for value in event.summary.value]
    assert points == [(7, "reward/mean", 0.25), (8, "reward/mean", 0.5)]


def test_twenty_runs_that_start_at_once_have_twenty_folders(tmp_path):
    with ThreadPoolExecutor(20) as pool:
        folders = list(pool.map(lambda _: RunFolder.create(tmp_path, "same", "", tensorboard=False).path, range(20)))
    assert len(set(folders)) == 20 and all(path.name.startswith("same-20") for path in folders)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, '"NaN"'),
        (-math.inf, '"-Infinity"'),
        (np.float64("inf"), '"Infinity"'),
        (np.int64(3), "3"),
        (np.array([1, 2]), "[1, 2]"),
        ({"a": (1, None, True)}, '{"a": [1, null, true]}'),
        (Path("x"), '"x"'),
    ],
)
def test_json_is_strict_and_takes_what_metrics_hold(value, said):
    assert to_json(value) == said


def test_a_killed_run_leaves_every_step_it_finished(tmp_path):
    script = f"""
        from megarl.observe import RunFolder
        folder = RunFolder.create({str(tmp_path)!r}, "a", "")
        for step in range(50):
            folder.add_step(step, {{"reward/accuracy": 0.5}})
        print("ready", flush=True)
        import time
        time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (folder,) = tmp_path.iterdir()
    assert load(folder).steps == list(range(50))


# ---- trouble: no mock anywhere, the kernel itself refuses


def test_a_full_disk_is_one_sentence_naming_the_file(tmp_path):
    """/dev/full takes nothing and says what a full disk says."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError) as caught:
        JsonLines(tmp_path / "metrics.jsonl").add({"step": 1})
    assert str(caught.value) == f"cannot write {tmp_path}/metrics.jsonl: the disk is full"
    (tmp_path / f".summary.json.{os.getpid()}.part").symlink_to("/dev/full")
    with pytest.raises(RunError) as caught:
        write_whole(tmp_path / "summary.json", "{}")
    assert str(caught.value) == f"cannot write {tmp_path}/summary.json: the disk is full"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]  # nothing half-written is left


def test_a_full_disk_under_tensorboard_does_not_hide(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "")
    with open("/dev/full", "ab", buffering=0) as full:
        folder._board._file._file, old = full, folder._board._file._file
        with pytest.raises(RunError, match=r"cannot write .*/tensorboard/events.*: the disk is full"):
            folder.add_step(1, {"reward/mean": 1.0})
        folder._board._file._file = old
    folder.close()


def test_a_disk_that_fills_up_during_a_run_stops_it_with_what_fitted_readable(tmp_path):
    """A disk of 64 KiB where one may be mounted; where not, a limit on the size of files, which the kernel enforces alike."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    limit = "" if mounted else "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))"
    script = f"""
        {limit}
        from megarl.errors import RunError
        from megarl.observe import RunFolder
        folder = RunFolder.create({str(disk)!r}, "a", "x: 1")
        try:
            for step in range(100_000):
                folder.add_step(step, {{"reward/accuracy": 0.5}})
        except RunError as error:
            print(error)
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True
        )
        (folder,) = disk.iterdir()
        reason = "the disk is full" if mounted else os.strerror(errno.EFBIG)
        assert done.stdout.startswith(f"cannot write {folder}/") and done.stdout.endswith(f": {reason}\n")
        assert len(done.stdout.splitlines()) == 1 and done.stderr == ""
        steps = load(folder).steps
        assert len(steps) > 50 and steps == list(range(len(steps)))
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b"])
def test_a_run_name_that_is_no_name_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="run.name must be a plain name"):
        RunFolder.create(tmp_path, name, "")


def test_a_root_that_cannot_hold_runs_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="run.root: .*file is not a folder"):
        RunFolder.create(tmp_path / "file", "a", "")
    with pytest.raises(UserError, match="run.root: cannot write .*: Not a directory"):
        RunFolder.create(tmp_path / "file" / "runs", "a", "")
    with pytest.raises(UserError, match="run.root: cannot write /proc/self/.*"):
        RunFolder.create("/proc/self/runs", "a", "")


def test_reasons_are_said_in_plain_words():
    said = {
        code: trouble(Path("/x/f"), OSError(code, os.strerror(code)))
        for code in (errno.EACCES, errno.EDQUOT, errno.EIO)
    }
    assert said == {
        errno.EACCES: "cannot write /x/f: permission denied",
        errno.EDQUOT: "cannot write /x/f: the disk quota is used up",
        errno.EIO: "cannot write /x/f: Input/output error",
    }


def test_the_curve_is_drawn_where_matplotlib_is(tmp_path):
    metrics = {"step": [0.0, 1.0, 2.0], "reward/accuracy": [math.nan, 0.2, 0.4], "eval/accuracy": [0.1, math.nan, 0.5]}
    there = importlib.util.find_spec("matplotlib") is not None
    assert draw_curve(metrics, tmp_path / "curve.png", "a run") is there
    assert draw_curve({}, tmp_path / "empty.png", "nothing measured") is there
    assert (tmp_path / "curve.png").exists() is there
    if there:
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "curve.png").stat().st_size > (tmp_path / "empty.png").stat().st_size


def test_metrics_are_lines_of_flat_json(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "", tensorboard=False)
    folder.add_step(3, {"reward/mean": 0.5})
    assert json.loads((folder.path / "metrics.jsonl").read_text()) == {"step": 3, "reward/mean": 0.5}
