"""Several machines, which here are nodes of Ray on this one: started by torchrun, joined by one run, ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megarl import launch
from tests.controller.runs import LEARNABLE, ROOT, processes
from tests.controller.test_resume import PPO, check_same, finished
from tests.distributed import free_port

APART = (  # actor on two cores of one node, the critic on a core of another
    "critic.parallel.ranks=1",
    "reshard.transport=distributed",
)


class Machines:
    """One torchrun for each of two machines, as each would be started there."""

    def __init__(self, folder: Path, *overrides: str):
        self.folder, self.root = folder, folder / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        environment = {**os.environ, "MEGARL_NODE_CPUS": "2", "MEGARL_NODE_OBJECT_STORE_MB": "100"}
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=test",
            "--local-addr=127.0.0.1",
        ]
        command += ["-m", "megarl.launch", "train", "configs/tiny.yaml", f"run.root={self.root}", *overrides]
        self.logs = [folder / f"machine{number}.log" for number in range(2)]
        self.agents = [
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT)
            for log in self.logs
        ]

    @property
    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self.logs)

    def codes(self, timeout: float) -> list[int]:
        end = time.monotonic() + timeout
        try:
            return [agent.wait(max(1.0, end - time.monotonic())) for agent in self.agents]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout:.0f} s:\n{self.said[-3000:]}") from None

    def until(self, condition: Any, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end and all(a.poll() is None for a in self.agents), self.said[-3000:]
            time.sleep(0.2)

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            for pid in [*processes(agent.pid), agent.pid] if agent.poll() is None else []:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_machines_do_what_one_does(tmp_path: Path) -> None:
    recording = tmp_path / "rollouts.jsonl"
    one = finished(tmp_path / "one", *PPO, f"rollout.record={recording}")
    with Machines(tmp_path / "two", *PPO, *APART, f"rollout.replay={recording}") as two:
        assert two.codes(400) == [0, 0], two.said[-3000:]
    (folder,) = two.root.iterdir()
    check_same(one.run_folder, folder, 1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_fails_ends_on_all_machines(tmp_path: Path) -> None:
    settings = (*LEARNABLE, "data.eval=null", "run.steps=1000", "reshard.transport=distributed")
    with Machines(tmp_path, *settings) as two:
        two.until(lambda: list(two.root.glob("*/metrics.jsonl")), 300)
        title = b"ray::Worker"
        below = [pid for agent in two.agents for pid in processes(agent.pid)]
        workers = [pid for pid in below if title in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(workers[0], signal.SIGKILL)
        assert all(two.codes(120)), two.said[-3000:]
    assert "megarl: " in two.said and "died" in two.said


@pytest.mark.slow
def test_bad_input_ends_all_machines_with_its_list(tmp_path: Path) -> None:
    with Machines(tmp_path, "actor.parallel.tensor=5") as two:
        assert all(two.codes(200))
        assert "the configuration cannot run" in two.said


@pytest.mark.parametrize(
    ("arguments", "given", "said"),
    [
        ([], {}, "starts `train CONFIG"),
        (["train", "x.yaml"], {}, "is started by torchrun, and RANK is not set"),
        (["train", "x.yaml"], {"LOCAL_WORLD_SIZE": "8"}, "set --nproc-per-node 1"),
    ],
)
def test_what_is_wrong_with_the_start(
    arguments: list[str], given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
        if given:
            monkeypatch.setenv(name, "1")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert launch.main(arguments) == 2
    assert said in capsys.readouterr().err
