"""Checkpoints as folders: whole or not there, the newest kept, and one sentence for each way to be damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl import config
from megarl.config import Config
from megarl.controller import checkpoint
from megarl.controller.checkpoint import Checkpoints
from megarl.errors import RunError, UserError

STATE = {"prompts": {"epoch": 0, "position": 8}}


class Role:
    """Writes one file, as ranks write theirs; `fails` instead."""

    def __init__(self, content: bytes = b"weights", fails: bool = False):
        self.content, self.fails = content, fails

    def begin_save(self, folder: Path, role: str, copied: bool) -> None:
        (folder / role).mkdir()
        (folder / role / "part").write_bytes(self.content)

    def written(self, role: str) -> bool:
        return True

    def finish_save(self, role: str) -> dict[str, int]:
        if self.fails:
            raise RunError("the disk is full")
        return {f"{role}/part": len(self.content)}


def save(checkpoints: Checkpoints, *of: Any) -> None:
    checkpoints.begin(*of)
    checkpoints.finish()


def made(**sections: Any) -> Config:
    return config.load("configs/tiny.yaml", [f"{key.replace('__', '.')}={value}" for key, value in sections.items()])


def run_of(folder: Path, steps: int, keep: int = 9, cfg: Config | None = None) -> Path:
    run = folder / "tiny-20300101-000000"
    for step in range(1, steps + 1):
        save(Checkpoints(run, keep), step, cfg or made(), STATE | {"of": step}, {"actor": Role()})
    return run


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3)
    for path in (run, run / "checkpoints" / "step-000003"):
        found = checkpoint.read(path)
        assert (found.step, found.state["of"], found.run) == (3, 3, run)
        assert found.files == {"actor/part": 7}
    assert checkpoint.read(run / "checkpoints" / "step-000002").instead().endswith("step-000003")
    assert list(checkpoint.problems(found, made(run__steps=4))) == []


def test_the_newest_are_kept(tmp_path: Path) -> None:
    run = run_of(tmp_path, 5, keep=2)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["latest", "step-000004", "step-000005"]
    assert (run / "checkpoints" / "latest").read_text() == "step-000005\n"


def test_one_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    with pytest.raises(RunError, match="disk is full"):
        save(Checkpoints(run, 9), 3, made(), STATE, {"actor": Role(fails=True)})
    assert checkpoint.read(run).step == 2
    assert (run / "checkpoints" / ".step-000003.unfinished").is_dir()
    save(Checkpoints(run, 9), 3, made(), STATE, {"actor": Role()})
    assert not list((run / "checkpoints").glob(".*")) and checkpoint.read(run).step == 3


def test_one_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    writing = Checkpoints(run, 1)
    writing.begin(3, made(), STATE, {"actor": Role()}, True)
    assert (checkpoint.read(run).step, writing.unfinished) == (2, 3)
    assert writing.written()
    writing.finish()
    assert (checkpoint.read(run).step, writing.unfinished) == (3, None)


def test_what_json_cannot_hold_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="a problem holds what JSON cannot"):
        save(Checkpoints(tmp_path / "run", 1), 1, made(), {"payload": object()}, {})


def damage(folder: Path, how: str) -> None:
    state = folder / "state.json"
    if how == "no state":
        state.unlink()
    elif how == "half a state":
        state.write_text(state.read_text()[:40])
    elif how == "no step":
        state.write_text(json.dumps({k: v for k, v in json.loads(state.read_text()).items() if k != "step"}))
    elif how == "another state":
        state.write_text(state.read_text().replace('"position": 8', '"position": 9'))
    elif how == "null":
        state.write_text("null")
    elif how == "not text":
        state.write_bytes(b"\xff\xfe")
    elif how == "no checksums":  # as whole as another version may have written it
        content = json.loads(state.read_text())
        content = {key: value for key, value in content.items() if key not in ("checksums", "digest")}
        state.write_text(json.dumps(content | {"digest": checkpoint._digest(content)}))
    elif how == "no part":
        (folder / "actor" / "part").unlink()
    else:
        (folder / "actor" / "part").write_bytes(b"half")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no state", "is no checkpoint of a run"),
        ("half a state", "state.json is damaged"),
        ("no step", "state.json is damaged: it is not what was written"),
        ("another state", "state.json is damaged: it is not what was written"),
        ("null", "state.json is damaged: it is not what was written"),
        ("not text", "state.json cannot be read"),
        ("no checksums", "state.json is damaged: it is not what was written"),
        ("no part", "lacks actor/part"),
        ("half a part", "holds with another size than was written actor/part"),
    ],
)
def test_a_damaged_one_is_one_sentence_that_offers_another(tmp_path: Path, how: str, said: str) -> None:
    run = run_of(tmp_path, 2)
    damage(run / "checkpoints" / "step-000002", how)
    with pytest.raises(UserError) as error:
        checkpoint.read(run / "checkpoints" / "step-000002")
    assert said in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith(f"run.resume={run / 'checkpoints' / 'step-000001'}")


def test_where_latest_names_none_the_last_one_is_meant(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    for text in ("step-000009\n", "../checkpoints/step-000001\n", ""):
        (run / "checkpoints" / "latest").write_text(text)
        assert checkpoint.read(run).step == 2
    (run / "checkpoints" / "latest").unlink()
    assert (found := checkpoint.find(made(run__root=tmp_path, run__resume="auto"))) is not None and found.step == 2


def test_a_copy_without_its_run_is_refused(tmp_path: Path) -> None:
    """Its folder's files would be taken for the run's."""
    run = run_of(tmp_path, 1)
    shutil.copytree(run / "checkpoints" / "step-000001", tmp_path / "backup" / "step-000001")
    with pytest.raises(UserError, match="does not lie where its run wrote it"):
        checkpoint.read(tmp_path / "backup" / "step-000001")
    (tmp_path / "link").symlink_to(run / "checkpoints" / "step-000001")
    for way in (tmp_path / "link", run / "checkpoints" / "step-000001" / ".." / "step-000001"):
        assert checkpoint.read(way).run == run.resolve()


def test_a_course_that_is_left_counts_no_more(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3)
    one = Checkpoints(run, 1)
    one.go_on_from(1)
    assert checkpoint.read(run).step == 1
    save(one, 2, made(), STATE, {"actor": Role()})
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["latest", "left-step-000002", "left-step-000003", "step-000002"] and checkpoint.read(run).step == 2


def test_auto_takes_the_newest_run_that_is_not_finished(tmp_path: Path) -> None:
    cfg = made(run__root=tmp_path, run__resume="auto")
    assert checkpoint.find(cfg) is None
    run = run_of(tmp_path, 1)
    (tmp_path / "tiny-20310101-000000").mkdir()  # it wrote none
    for name in ("tinyother", "tiny-two", "tin"):
        save(Checkpoints(tmp_path / f"{name}-20320101-000000", 1), 7, made(), STATE, {})
    assert (found := checkpoint.find(cfg)) is not None and found.run == run
    (run / "summary.json").write_text('{"status": "finished"}')
    assert checkpoint.find(cfg) is None
    assert checkpoint.find(made(run__root=tmp_path)) is None


def test_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no checkpoint of a run, nor a run's folder"):
        checkpoint.find(made(run__resume=tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run__seed": 7}, "run.seed was 1 in the run"),
        ({"data__prompts_per_step": 2}, "data.prompts_per_step was 4"),
        ({"model__path": "tiny-llama"}, 'model.path was "tiny-qwen3"'),
        ({"model__dtype": "bfloat16"}, 'model.dtype was "float32"'),
        ({"actor__optimizer__frozen": "[model.embed*]"}, "actor.optimizer.frozen was []"),
        ({"critic__head_std": 0.1}, "had no critic, and this one has one"),
        ({"run__steps": 2}, "is of step 3, and run.steps=2"),
    ],
)
def test_a_change_that_cannot_be_had_is_told(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    found = checkpoint.read(run_of(tmp_path, 3))
    problems = list(checkpoint.problems(found, made(**{"run__steps": 9, **changes})))
    assert len(problems) == 1 and said in problems[0]


def test_other_changes_are_known(tmp_path: Path) -> None:
    found = checkpoint.read(run_of(tmp_path, 3))
    cfg = made(run__steps=9, actor__optimizer__lr=0.5, actor__parallel__tensor=1, run__resume="auto")
    changed = checkpoint.changed(found, cfg)
    assert changed == {
        "run.steps": (2, 9),
        "actor.optimizer.lr": (1e-4, 0.5),
        "actor.parallel.tensor": (2, 1),
    }
    assert list(checkpoint.problems(found, cfg)) == []
