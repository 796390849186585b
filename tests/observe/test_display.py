"""What a person sees: in a real pseudo-terminal, in a pipe, on narrow and wide screens."""

import io
import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megarl.errors import RunError
from megarl.observe import Observer
from megarl.observe.conversations import choose, panel, records, shorten
from megarl.observe.line import StepLine, bar, percent, short, small, sparkline
from megarl.observe.progress import Progress, clock
from megarl.observe.report import load
from tests.observe.conftest import metrics_of, scored_batch

ROOT = Path(__file__).parents[2]


def console(width: int = 118) -> Console:
    return Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)


def run(config, batch, screen: Console, steps: int = 4) -> Observer:
    config.observe.samples_every = 2
    with Observer(config, "run: {}\n", screen) as observer:
        with observer.stage("starting the engine"):
            observer.note("a note")
        observer.evaluated(0, {"eval/accuracy": 0.25})
        for step in range(1, steps + 1):
            with observer.stage("rollout"):
                assert observer.stage.current == "rollout"
            observer.step(step, metrics_of(step), batch)
        with observer.stage("evaluate"):
            observer.note("evaluating")
        observer.evaluated(steps, {"eval/accuracy": 0.75}, batch)
        observer.finish([("the trained model", "/somewhere/hf")])
    return observer


def test_a_run_without_a_terminal_is_plain_readable_lines(config, batch):
    screen = console()
    observer = run(config, batch, screen)
    said = screen.file.getvalue()
    assert "\x1b" not in said
    assert all(len(line) <= 118 or str(observer.folder.path) in line for line in said.splitlines())
    assert re.search(r"\[ +\d+\.\d s\] starting the engine …", said) and "] rollout …" not in said
    assert re.search(
        r"^ +2/4 +0\.300 +0\.300 █▊ +12\.0 +0\.500 +1\.2e-5 +0\.0200 +3\.4% +1\.50 +1234 +4\.0 +1\.0 +0\.5 +2\.0 +0\.5$",
        said,
        re.MULTILINE,
    )
    assert "held out, greedy, before the first step: accuracy 0.250" in said
    assert "0.250 → 0.750   +0.500" in said and "first 3 → 0.350 last 4" in said and "every sync verified" in said
    assert "the trained model" in said and "/somewhere/hf" in said and f"{observer.folder.path}/metrics.jsonl" in said
    assert said.count("╭─  step 1 · ") == 3 and said.count("╭─  step 2 · ") == 3 and "╭─  step 3 · " not in said


def test_the_folder_of_a_run_says_the_same_as_the_screen(config, batch):
    folder = run(config, batch, console()).folder.path
    report = load(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert {key: summary[key] for key in report.summary()} == report.summary()
    assert summary["greedy_accuracy"]["gain"] == 0.5
    assert report.steps == [0, 1, 2, 3, 4]
    assert len(report.samples) == 5 * 4 and sum(sample.get("split") == "eval" for sample in report.samples) == 4
    assert report.samples[0] == {
        "step": 1, "uid": "train-0", "prompt": "say 0", "response": "0", "reward": 1.0, "answer": "0",
        "stop_reason": "stop", "tokens": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (KeyboardInterrupt("told to end"), "interrupted"),
        (RunError("a worker died"), "failed"),
        (None, "interrupted"),
    ],
)
def test_a_run_that_did_not_finish_says_so_and_is_readable(config, batch, error, status):
    observer = Observer(config, "", console())
    try:
        with observer:
            observer.step(1, metrics_of(1), batch)
            if error is not None:
                raise error
    except (KeyboardInterrupt, RunError) as raised:
        assert raised is error
    summary = json.loads((observer.folder.path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == (status, 1)
    assert summary.get("error") == (str(error) if error is not None and error.args else None)


def test_when_the_disk_is_full_the_first_error_is_the_one_that_is_raised(config, batch):
    screen = console()
    observer = Observer(config, "", screen)
    (observer.folder.path / f".summary.json.{os.getpid()}.part").symlink_to("/dev/full")
    with pytest.raises(RunError, match="a worker died"), observer:
        raise RunError("a worker died")
    assert "summary.json: the disk is full" in screen.file.getvalue().replace("\n", "")


IN_A_TERMINAL = """
import sys, time
from megarl.config.schema import Config
from megarl.observe import Observer

config, pace = Config(), float(sys.argv[2])
config.run.root, config.run.steps, config.observe.tensorboard = sys.argv[1], 3, False
with Observer(config, "") as observer:
    with observer.stage("starting the engine"):
        time.sleep(pace)
    for step in range(1, 4):
        for name in ("rollout", "log_probs", "update"):
            with observer.stage(name):
                time.sleep(pace)
        print("a line from a worker")
        observer.step(step, {"reward/mean": 0.3, "reward/accuracy": 0.3, "time/step": 0.9})
        said = {"uid": "a", "prompt": "say", "response": "\\x1b[2Jgone", "reward": 0.0, "stop_reason": "stop", "tokens": 3}
        observer.progress.show_samples([{"step": step, **said}])
        if sys.argv[3:] == ["fail"] and step == 2:
            raise SystemExit(3)
    observer.finish()
"""


def in_a_terminal(*arguments: str, term: str = "xterm-256color", width: int = 100) -> tuple[int, str]:
    """What a run writes to a real pseudo-terminal, and its exit code."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": term, "COLUMNS": str(width), "LINES": "40", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says EIO when the other side is closed
            break
        said += part
    os.close(ours)
    return process.wait(), said.decode()


@pytest.mark.parametrize("ending", ["finish", "fail"])
def test_in_a_terminal_the_stages_move_and_the_terminal_is_given_back(tmp_path, ending):
    code, said = in_a_terminal(str(tmp_path), "0.3", ending)
    assert code == (3 if ending == "fail" else 0)
    words = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)
    assert "▸ starting the engine" in words and re.search(r"▸ rollout 0\.\d s", words)
    assert re.search(r"✔ rollout 0\.3 .*▸ log-probs 0\.[0-3] s .*  update ~0\.3", words)
    assert words.count("a line from a worker") == (3 if ending == "finish" else 2)
    assert re.search(r" 2/3 +0\.300 ", words)
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")  # the cursor is shown again
    assert "\x1b[2J" not in said and "[2Jgone" in words  # what a model writes never commands the terminal


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(tmp_path):
    code, said = in_a_terminal(str(tmp_path), "0", term="dumb")
    assert code == 0 and "\x1b" not in said and "s] starting the engine …" in said


def test_a_log_file_is_as_wide_as_a_line_and_takes_any_letter_in_any_encoding(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path), "0"]
    done = subprocess.run(command, check=True, capture_output=True, env=environment, text=True)
    assert any(line.endswith(" update reshard") for line in done.stdout.splitlines())  # the last columns have room
    assert "training accuracy" in done.stdout and done.stderr == ""


@pytest.mark.parametrize(("width", "shown"), [(118, 15), (100, 12), (80, 8), (20, 1)])
def test_columns_give_way_on_narrow_screens_and_lines_fit(width, shown):
    line = StepLine(1000, width)
    assert abs(len(line.columns) - shown) <= 1
    for text in (*line.header().plain.splitlines(), line.line(1000, metrics_of(3)).plain):
        assert len(text) <= width
    assert len(line.header().plain.splitlines()[1]) == len(line.line(12, metrics_of(3)).plain)


def test_a_line_says_what_is_missing_and_what_is_not_finite():
    text = (
        StepLine(10, 118)
        .line(1, {"reward/accuracy": 0.5, "actor/grad_norm": math.inf, "actor/entropy": math.nan})
        .plain
    )
    assert "0.500 ███" in text and " inf " in text and " nan " in text and text.count("·") == 11
    extreme = dict.fromkeys(metrics_of(1), 123456789.0)
    assert len(StepLine(10, 118).line(1, extreme).plain) == len(text)


@pytest.mark.parametrize(
    ("form", "value", "said"),
    [
        (small, 0.0, "0"), (small, 1.234e-5, "1.2e-5"), (small, 0.02131, "0.0213"), (small, -2e-7, "-2.0e-7"),
        (short, 0.0213, "0.021"), (short, 2.391, "2.39"), (short, 12.34, "12.3"), (short, 812.4, "812"), (short, 0.0, "0.000"),
        (percent, 0.004, "0.4%"), (percent, 0.12, "12%"), (percent, 1.0, "100%"),
        (clock, 62.9, "1:02"), (clock, 3723, "1:02:03"), (clock, -5, "0:00"),
        (lambda share: bar(share, 4), 0.5, "██  "), (lambda share: bar(share, 4), math.nan, "    "),
        (lambda share: bar(share, 4), 7.0, "████"), (lambda share: bar(share, 4), 0.28, "█▏  "),
    ],
)  # fmt: skip
def test_numbers_are_short(form, value, said):
    assert form(value) == said


def test_a_course_in_a_few_characters():
    assert sparkline([0, 0.5, 1], 10) == "▁▅█"
    assert sparkline([0.0] * 50 + [1.0] * 50, 4) == "▁▁██"
    assert sparkline([], 4) == ""


def test_three_conversations_show_the_best_the_worst_and_another_prompt():
    batch = scored_batch(["a", "b", "c", "d", "e", "f"], [0.5, 0.5, 0.0, 0.5, 1.0, 0.5])
    chosen = choose(records(batch, 3))
    assert [sample["response"] for sample in chosen] == ["e", "c", "a"]
    assert len(choose(records(batch.take([0, 1]), 3))) == 2 and choose([]) == []


def test_a_conversation_is_shortened_and_harmless():
    sample = records(scored_batch(["x", "\x1b[31m\x07red" + "y" * 5000 + "end"], [0.0, 0.0]), 3)[1]
    screen = console(100)
    screen.print(panel(sample))
    said = screen.file.getvalue()
    assert "\x1b" not in said and "\x07" not in said and "[…]" in said and "end" in said and len(said) < 2500
    assert "cut off" in said and "[31m" in said  # brackets are text, not markup
    assert shorten("\n".join(str(line) for line in range(100))).count("\n") == 9


def test_a_new_header_comes_after_twenty_lines():
    screen = console()
    with Progress(50, console=screen) as progress:
        for step in range(1, 42):
            progress.show_step(step, metrics_of(step))
    assert screen.file.getvalue().count("accuracy") == 3
