"""The command as a person meets it: help, exit codes, models, doctor."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import __version__, cli
from megarl.controller.preflight import lacking_space, preflight_file
from megarl.errors import ConfigError, RunError, UserError

ROOT = Path(__file__).parents[2]


def megarl(*args: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "megarl.cli", *args],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path} | (env or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys\nfrom megarl.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'ray', 'sglang', 'megatron', 'omegaconf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for args in (
        ["--help"],
        ["train", "--help"],
        ["plan", "--help"],
        ["convert", "--help"],
        ["models", "--help"],
        ["--version"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, check=False, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert ("usage: megarl" in done.stdout) == (args != ["--version"])
    assert done.stdout == f"megarl {__version__}\n"


def test_a_broken_file_through_the_real_command(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("run: {stepz: 3}\nmodel:\n  path: [\n", encoding="utf-8")
    done = megarl("train", "c.yaml", "rollout.nn=3", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "megarl: the configuration cannot run: 2 problems",
        "  - c.yaml:3: not valid YAML: did not find expected node content",
        "  - 'rollout.nn=3' on the command line: unknown key rollout.nn; did you mean rollout.n?",
    ]


@pytest.mark.parametrize("args", [[], ["trian"], ["train"], ["models"], ["models", "get"], ["train", "c.yaml", "--x"]])
def test_a_wrong_command_line_is_a_usage_error(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(args)
    assert stopped.value.code == 2
    assert "usage: megarl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("the port is taken"), 2, "megarl: the port is taken\n"),
        (ConfigError(["one", "two"]), 2, "megarl: cannot run: 2 problems\n  - one\n  - two\n"),
        (RunError("a worker died"), 1, "megarl: a worker died\n"),
        (KeyboardInterrupt(), 130, "megarl: interrupted\n"),
        (KeyboardInterrupt("told to end"), 130, "megarl: interrupted: told to end\n"),
    ],
)
def test_each_error_has_its_exit_code_and_no_traceback(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert cli.guarded("cannot run", fail) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("args", "closed"),
    [(["models", "list"], "stdout"), (["--help"], "stdout"), (["models", "get", "nothing"], "stderr")],
)
def test_output_that_nobody_reads_ends_quietly(
    args: list[str], closed: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1 if closed == "stderr" else -1) as pipe:
        monkeypatch.setattr(sys, closed, pipe)
        assert cli.main(args) == 141
        pipe.write("what Python says at its end\n")
    assert capfd.readouterr() == ("", "")


def test_output_that_the_disk_does_not_take_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for buffered in (True, False):  # it fails at the end, or where the first line is printed
        with open("/dev/full", "wb", buffering=0) as file:
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, write_through=not buffered))
            assert cli.main(["models", "list"]) == 1
        assert capsys.readouterr().err == "megarl: the output could not be written: No space left on device.\n"


@pytest.mark.parametrize("args", [["models", "get", "nothing"], ["train", "nothing.yaml"]])
@pytest.mark.parametrize("closed", [True, False])
def test_bad_input_is_exit_code_2_wherever_its_sentence_goes(
    args: list[str], closed: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", None if closed else full)
        assert cli.main(args) == 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert capfd.readouterr() == ("", "")


def test_another_broken_pipe_is_not_taken_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise BrokenPipeError(32, "Broken pipe")

    assert cli.guarded("cannot run", fail) == 1
    assert "this is a bug in megarl" in capsys.readouterr().err


def test_a_bug_is_called_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.guarded("cannot run", lambda: 1 // 0) == 1
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said and said.splitlines()[-1].startswith("megarl: this is a bug in megarl")


def test_tiny_models_are_made_listed_and_checked(tmp_path: Path) -> None:
    env = {"MEGARL_CACHE": str(tmp_path / "cache")}
    made = megarl("models", "make-tiny", "llama", "--out", "m", "--seed", "3", cwd=tmp_path)
    assert (made.returncode, made.stdout, made.stderr) == (0, "m\n", "")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "llama"
    again = megarl("models", "make-tiny", "llama", "--out", "m", cwd=tmp_path)
    assert again.returncode == 2 and again.stderr.endswith("m exists already and is not overwritten.\n")
    got = megarl("models", "get", "tiny-qwen3", cwd=tmp_path, env=env)
    assert got.returncode == 0 and (Path(got.stdout.strip()) / "model.safetensors").is_file()
    unknown = megarl("models", "get", "smolm2", cwd=tmp_path, env=env)
    assert unknown.returncode == 2 and "smollm2" in unknown.stderr and "Traceback" not in unknown.stderr
    assert "smollm2" in megarl("models", "list").stdout.split()


def test_doctor_says_what_is_there_and_what_is_used_instead(tmp_path: Path) -> None:
    done = megarl("doctor", cwd=tmp_path, env={"MEGARL_CACHE": str(tmp_path / "no" / "cache")})
    assert done.returncode == 0 and done.stderr == ""
    for what in (
        "megatron-core", "Ray", "SGLang", "SGLang kernels", "Transformer Engine", "apex", "flash-attn", "PyTorch",
        "CUDA", "AMX bfloat16", "AVX-512 bfloat16", "memory", "/dev/shm", "cache",
    ):  # fmt: skip
        assert f"\n  {what} " in done.stdout, what
    rows = [line for line in done.stdout.splitlines() if " not found " in line]
    assert all("used: " in row or "needed" in row or "bfloat16" in row for row in rows)


def test_doctor_survives_packages_that_break_when_imported(tmp_path: Path) -> None:
    broken = tmp_path / "transformer_engine"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    (broken / "pytorch.py").write_text("import os; os.abort()")
    (tmp_path / "apex.py").write_text("raise RuntimeError('built for another torch')")
    done = megarl("doctor", cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])})
    assert done.returncode == 0
    assert "does not import (exit code -6" in done.stdout or "does not import (Fatal Python error" in done.stdout
    assert "does not import (RuntimeError: built for another torch); used: PyTorch's AdamW" in done.stdout


def test_a_good_configuration_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    cfg, prepared = preflight_file(ROOT / "configs" / "tiny.yaml", [f"run.root={tmp_path}/runs", "run.steps=1"])
    assert cfg.run.steps == 1 and prepared.model.family == "qwen3" and prepared.folder.is_dir()
    assert prepared.sources.eval is not None
    train, held_out = ({p.text for p in source.all()} for source in (prepared.sources.train, prepared.sources.eval))
    assert len(held_out) == cfg.data.eval.size and not train & held_out  # type: ignore[union-attr]
    assert not (tmp_path / "runs").exists()


def test_a_disk_too_small_is_a_sentence(tmp_path: Path) -> None:
    assert list(lacking_space("run.root", tmp_path / "not" / "yet", 1)) == []
    (sentence,) = lacking_space("run.root", tmp_path / "not" / "yet", 1 << 60)
    assert (
        sentence.startswith(f"run.root ({tmp_path}/not/yet) has ")
        and "the run needs about 1099511627776 MiB" in sentence
    )
