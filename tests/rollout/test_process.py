"""An engine's processes: none outlives it, however it ends, and its failures are one sentence."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megarl.cpu import process_env
from megarl.errors import RunError, UserError
from megarl.rollout import session
from megarl.rollout.engine import Engine, last_error

START = "import sys, time; from megarl.rollout.engine import Engine; e = Engine(sys.argv[1], dtype='float32', max_total_tokens=1024)"


def processes_of(host):
    """Processes of the session that the host leads."""
    out = subprocess.run(["ps", "-eo", "pid,sid,stat"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in out.splitlines()[1:]]
    return [int(pid) for pid, session, state in rows if session == str(host) and not state.startswith("Z")]


def gone_within(host, seconds):
    deadline = time.monotonic() + seconds
    while processes_of(host) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes_of(host)


def test_killed_while_running_leaves_nothing(folder):
    code = START + "; print(e.ready()['pid'], flush=True); time.sleep(100)"
    owner = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    host = int(owner.stdout.readline())
    shared = session.shared_files(host)
    assert len(processes_of(host)) >= 2  # the host and the scheduler
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert gone_within(host, 10)
    assert shared and not [path for path in shared if path.exists()]


def test_killed_while_starting_leaves_nothing(folder):
    owner = subprocess.Popen([sys.executable, "-c", START, str(folder)])
    host = None
    deadline = time.monotonic() + 60
    while host is None and time.monotonic() < deadline:
        time.sleep(0.05)
        out = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
        children = [row.split()[0] for row in out.splitlines()[1:] if row.split()[1] == str(owner.pid)]
        host = int(children[0]) if children else None
    while len(processes_of(host)) < 3 and time.monotonic() < deadline:  # a scheduler that has not yet imported anything
        time.sleep(0.05)
    assert len(processes_of(host)) >= 3
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert gone_within(host, 10)


@pytest.mark.parametrize("call", ["generate", pytest.param("begin_update", marks=pytest.mark.slow)])
def test_a_scheduler_that_dies_is_one_sentence_and_leaves_nothing(folder, call):
    """While it samples, and while a call waits for its answer without any limit of its own."""
    engine = Engine(str(folder), dtype="float32", max_total_tokens=1024, progress_timeout=60)
    host = engine.ready()["pid"]
    shared = session.shared_files(host)
    scheduler = next(pid for pid in processes_of(host) if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(scheduler, signal.SIGKILL)
    from megarl.batch.sample import Prompt
    from megarl.rollout.sampling import Sampling

    arguments = {"generate": ([Prompt("a", [5, 6])], Sampling(max_new_tokens=4)), "begin_update": (1,)}[call]
    with pytest.raises(RunError, match="the SGLang engine died"):
        getattr(engine, call)(*arguments)
    with pytest.raises(RunError, match="is not running"):
        engine.ready()
    assert gone_within(host, 5)
    engine.shutdown()
    assert shared and not [path for path in shared if path.exists()]


@pytest.mark.slow
def test_an_update_in_place_ends_when_the_scheduler_has_become_idle(folder):
    """Its last answer may be here before."""
    script = Path(__file__).with_name("busy_scheduler.py")
    env = {**os.environ, **process_env(1), "PYTHONPATH": str(script.parents[2])}
    ran = subprocess.run(
        [sys.executable, str(script), str(folder)], check=False, env=env, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["before"] < said["tokens"] == 300  # it was sampling when the update was to end
    assert said["proved"] and said["version"] == 2
    assert said["again"] == "no weight update was begun"


def test_a_scheduler_that_dies_at_start_is_one_sentence(folder):
    with pytest.raises(RunError, match="died while starting.*: .*Error") as caught:
        Engine(
            str(folder),
            dtype="float32",
            max_total_tokens=1024,
            extra={"quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"},
        )
    assert "\n" not in str(caught.value)


def test_unknown_arguments_are_named_before_a_scheduler_starts_and_no_file_stays(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match="max_runing_requests; the nearest that it has is max_running_requests"):
        Engine(str(folder), extra={"max_runing_requests": 4})
    assert list(tmp_path.iterdir()) == []


def test_last_error_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("hello\nTraceback:\n  File x\ntorch.OutOfMemoryError: no room\n\nEOFError\nbye\n")
    assert last_error(log) == "torch.OutOfMemoryError: no room"
    log.write_text("hello\n\nloading: 100% Completed | 1/1 [00:00<00:00, 603.32it/s]\n 0% | 0/1 [00:00<?, ?it/s]\n")
    assert last_error(log) == "hello" and last_error(log, errors_only=True) == ""
    assert last_error(tmp_path / "none") == ""
