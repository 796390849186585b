"""Reading: composition, overrides, round trips, and every problem told at its place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megarl.config import Config, dump, load, problems, read
from megarl.config.schema import ModelConfig, SourceConfig
from megarl.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def complaints(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, list(overrides))
    return caught.value.problems


def test_later_bases_win_over_earlier_ones_and_the_file_over_all(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep", root="run: {steps: 1, seed: 1, name: root}\nmodel: {path: m}\n")
    write(tmp_path, one="base: deep/root.yaml\nrun: {seed: 2}\nrollout: {engine: {a: 1, b: {c: 2}}}")
    write(tmp_path, two="run: {seed: 3, name: two}\nrollout: {engine: {b: {d: 3}}}")
    write(tmp_path, top="base: [one.yaml, two.yaml]\nrun: {name: top}")
    cfg = load(tmp_path / "top.yaml", ["run.steps=9", "rollout.engine.b.c=7"])
    assert (cfg.run.name, cfg.run.seed, cfg.run.steps, cfg.model.path) == ("top", 3, 9, "m")
    assert cfg.rollout.engine == {"a": 1, "b": {"c": 7, "d": 3}}


def test_two_ways_to_one_base_are_no_circle(tmp_path: Path) -> None:
    write(tmp_path, root="model: {path: m}", one="base: root.yaml", two="base: root.yaml")
    write(tmp_path, top="base: [one.yaml, two.yaml]")
    assert load(tmp_path / "top.yaml").model.path == "m"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rollout.n=4", "rollout.n", 4),
        ("actor.optimizer.lr=2.5e-5", "actor.optimizer.lr", 2.5e-5),
        ("actor.optimizer.lr=1", "actor.optimizer.lr", 1.0),
        ("export.hf=no", "export.hf", False),
        ("reshard.verify=off", "reshard.verify", "off"),  # YAML reads a bare off as false
        ("algorithm.clip_dual=null", "algorithm.clip_dual", None),
        ("rollout.dtype=float32", "rollout.dtype", "float32"),
        ("data.suffix=' = x'", "data.suffix", " = x"),
        ("data.suffix='\"Answer: \"'", "data.suffix", '"Answer: "'),
        ("run.name=3", "run.name", "3"),
        ("data.eval.size=5", "data.eval.size", 5),  # there was no data.eval: the section is made
        ("data.train.task_args={min_terms: [1, 2]}", "data.train.task_args", {"min_terms": [1, 2]}),
        ("evaluation.max_new_tokens=${rollout.max_new_tokens}", "evaluation.max_new_tokens", 256),
    ],
)
def test_overrides(tmp_path: Path, override: str, key: str, value: object) -> None:
    write(tmp_path, c="model: {path: m}")
    found: object = load(tmp_path / "c.yaml", [override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_the_last_override_wins_and_a_section_can_be_taken_out(tmp_path: Path) -> None:
    write(tmp_path, c="model: {path: m}\ndata: {eval: {size: 3}}")
    cfg = load(tmp_path / "c.yaml", ["run.steps=1", "run.steps=2", "data.eval=null"])
    assert cfg.run.steps == 2 and cfg.data.eval is None


def test_everything_wrong_is_told_at_once_with_its_place(tmp_path: Path) -> None:
    write(tmp_path, base="rollout:\n  temprature: 1\nactr: {}\n")
    write(tmp_path, c="base: base.yaml\nactor:\n  lr: 1\n  optimizer:\n    lr: fast\ndata: 3\nrollout: {n: 2.5}\n")
    base, file = tmp_path / "base.yaml", tmp_path / "c.yaml"
    assert complaints(file, "run.stepz=1", "export.hf=maybe", "rollout.n", "zzz.y=1") == [
        "'rollout.n' on the command line: write an override as section.key=value",
        f"{base}:2: unknown key rollout.temprature; did you mean rollout.temperature?",
        f"{base}:3: unknown key actr; did you mean actor?",
        f"{file}:3: unknown key actor.lr; did you mean actor.optimizer.lr?",
        f"{file}:5: actor.optimizer.lr must be a number, not 'fast'",
        f"{file}:6: data must be a section of `key: value` lines, not 3",
        f"{file}:7: rollout.n must be a whole number, not 2.5",
        "'run.stepz=1' on the command line: unknown key run.stepz; did you mean run.steps?",
        "'export.hf=maybe' on the command line: export.hf must be true or false, not 'maybe'",
        "'zzz.y=1' on the command line: unknown key zzz; known here: "
        + ", ".join(f.name for f in dataclasses.fields(Config)),
        "model.path is not set; write it in the file or add model.path=... to the command",
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("rollout: {dtype: fp8}", "rollout.dtype must be one of bfloat16, float32 or null, not 'fp8'"),
        ("rollout: {n: true}", "rollout.n must be a whole number, not True"),
        ("rollout: {n: }", "rollout.n must be a whole number, not empty"),
        ("rollout: {engine: 3}", "rollout.engine must be a section of `key: value` lines, not 3"),
        ("run: {name: [a]}", "run.name must be text, not ['a']"),
        ("actor: ", "actor must be a section of `key: value` lines, not empty"),
        ("observe: {progress: 3.5}", "observe.progress must be true or false, not 3.5"),
        ("observe: {progress: 1}", "observe.progress must be true or false, not 1"),
        ("actor: {share_prompts: 5}", "actor.share_prompts must be true or false or null, not 5"),
        ("run: {steps: '???'}", "run.steps must be a whole number, not '???'"),
        ("rollout: {threads: many}", "rollout.threads must be a whole number or null, not 'many'"),
    ],
)
def test_a_wrong_type_says_what_would_be_right(tmp_path: Path, line: str, sentence: str) -> None:
    write(tmp_path, c=f"model: {{path: m}}\n{line}\n")
    assert complaints(tmp_path / "c.yaml") == [f"{tmp_path / 'c.yaml'}:2: {sentence}"]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"c": "base: a.yaml", "a": "base: c.yaml"}, "{t}/a.yaml: base goes in a circle: {t}/c.yaml -> {t}/a.yaml"),
        ({"c": "base: c.yaml"}, "{t}/c.yaml: base goes in a circle: {t}/c.yaml -> {t}/c.yaml"),
        ({"c": 'base: "a\\0b"'}, "'a\\x00b' holds a zero byte (named as base in {t}/c.yaml)"),
        ({"c": "base: no.yaml"}, "{t}/no.yaml: there is no such file (named as base in {t}/c.yaml)"),
        ({"c": "base: ."}, "{t}: this is a folder, not a YAML file (named as base in {t}/c.yaml)"),
        ({"c": "run: {}\nbase: 3"}, "{t}/c.yaml:2: base must be a path or a list of paths, not 3"),
        ({}, "{t}/c.yaml: there is no such file"),
        ({"c": "run:\n  name: x\n steps: 3"}, "{t}/c.yaml:3: not valid YAML: "),
        ({"c": "run: {name: x"}, "{t}/c.yaml:1: not valid YAML: "),
        ({"c": "run:\n\tname: x"}, "{t}/c.yaml:2: not valid YAML: found character that cannot start any token"),
        ({"c": "run: {}\nrun: {}"}, "{t}/c.yaml:2: not valid YAML: found duplicate key run"),
        ({"c": "- a"}, "{t}/c.yaml: must hold sections of `key: value` lines"),
        ({"c": "hello"}, "{t}/c.yaml: must hold sections of `key: value` lines"),
        ({"c": "model: {path: '${no.such}'}"}, "model.path: Interpolation key 'no.such' not found"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, files: dict[str, str], sentence: str) -> None:
    write(tmp_path, **files)
    found = [problem for problem in complaints(tmp_path / "c.yaml") if "model.path is not set" not in problem]
    assert len(found) == 1 and "\n" not in found[0]
    assert found[0].startswith(sentence.format(t=tmp_path))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"run: \xff")
    assert complaints(tmp_path / "c.yaml") == [f"{tmp_path / 'c.yaml'}: is not UTF-8 text"]


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_an_empty_file_lacks_the_model(tmp_path: Path, text: str) -> None:
    write(tmp_path, c=text)
    assert complaints(tmp_path / "c.yaml") == [
        "model.path is not set; write it in the file or add model.path=... to the command"
    ]
    assert load(tmp_path / "c.yaml", ["model.path=m"]) == Config(model=ModelConfig(path="m"))


def test_reading_goes_on_where_a_setting_is_not_understood(tmp_path: Path) -> None:
    write(tmp_path, c="rollout: {n: many, top_k: 5}")
    reading = read(tmp_path / "c.yaml")
    assert reading.config is not None and reading.config.rollout.top_k == 5
    assert reading.unread == {"rollout.n", "model.path"} and len(reading.problems) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1e-5",
        "off",
        "null",
        "${rollout.n}",
        r"a\${b}",
        r"\\${b}",
        "${",
        "x: y",
        " \n# \n",
        "'\"",
        "ä 答",
        "0x1f",
        "1_0",
    ],
)
def test_dump_loads_back_equal_whatever_the_text(tmp_path: Path, text: str) -> None:
    cfg = load(CONFIGS / "demo.yaml")
    cfg.data.suffix, cfg.data.system, cfg.reward.options = text, text, {"a": [text, {"b": text}], "c": 1e-7}
    (tmp_path / "c.yaml").write_text(dump(cfg), encoding="utf-8")
    assert load(tmp_path / "c.yaml") == cfg


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_of_ours_loads_and_says_its_machine(path: Path, tmp_path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# Machine: ")
    cfg = load(path)
    assert problems(cfg) == []
    (tmp_path / "c.yaml").write_text(dump(cfg), encoding="utf-8")
    assert load(tmp_path / "c.yaml") == cfg
    assert "base" not in dump(cfg) and all(f"{field.name}:" in dump(cfg) for field in dataclasses.fields(Config))


def test_a_source_of_another_kind_inherits_nothing(tmp_path: Path) -> None:
    """Else a file of one's own could not be put into a recipe: the task that it builds on would stay, and its number of problems."""
    base = CONFIGS / "recipes/grpo.yaml"
    assert load(base).data.train.task == "chain_sum"
    (tmp_path / "own.yaml").write_text(
        f"base: {base}\ndata:\n  train: {{kind: jsonl, path: a.jsonl}}\n  eval: {{kind: parquet, path: b.parquet, size: 5}}\n"
    )
    by_file = load(tmp_path / "own.yaml").data
    by_command = load(
        base,
        ["data.train.path=a.jsonl", "data.train.kind=jsonl", "data.eval={kind: parquet, path: b.parquet, size: 5}"],
    ).data
    for data in (by_file, by_command):
        assert data.train == SourceConfig(kind="jsonl", path="a.jsonl")
        assert data.eval == SourceConfig(kind="parquet", path="b.parquet", size=5)
    assert load(base, ["data.train.kind=reasoning_gym", "data.train.size=7"]).data.train.task == "chain_sum"
