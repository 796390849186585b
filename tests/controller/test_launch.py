"""Several machines, which here are nodes of Ray on this one: started by torchrun, joined by one run, ended together."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl import launch
from tests.controller.runs import LEARNABLE, ROOT, processes
from tests.controller.test_resume import PPO, check_same, finished
from tests.distributed import free_port

# Adam makes much of little: four steps of 1e-3 on another layout differ by 2e-5 where a gradient is next to nothing.
LEARNS = (*PPO, "critic.optimizer.lr=1e-4")
CRITIC = ("critic.parallel.ranks=1", "reshard.transport=distributed")
APART = (*CRITIC, "rollout.pool=rollout")

NODE = {"MEGARL_NODE_CPUS": "2", "MEGARL_NODE_OBJECT_STORE_MB": "100"}
# What Slurm would have: two nodes of this name, and a srun that starts its command once for each of them.
SLURM = {
    "scontrol": "echo 127.0.0.1; echo 127.0.0.1",
    "srun": """
while [[ "$1" == --* ]]; do shift; done
for node in 0 1; do "$@" & pids+=" $!"; done
for pid in $pids; do wait "$pid" || code=$?; done
exit "${code:-0}"
""",
}


class Machines:
    """Processes that are what would be started on two machines, or from outside of them."""

    def __init__(self, folder: Path, *overrides: str, way: str = "torchrun"):
        self.folder, self.root = folder, folder / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        train = ["train", "configs/tiny.yaml", f"run.root={self.root}", *overrides]
        commands, more = {"torchrun": _torchrun, "slurm": _slurm, "ray": _ray}[way](folder, train)
        environment = {**os.environ, **NODE, **more}
        self.logs = [folder / f"machine{number}.log" for number in range(len(commands))]
        self.agents = [
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT)
            for command, log in zip(commands, self.logs, strict=True)
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


Commands = tuple[list[list[str]], dict[str, str]]  # and what their environment has beside


def _torchrun(folder: Path, train: list[str]) -> Commands:
    """One torchrun for each of the machines, as each would be started there."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test"]
    return [[*command, "--local-addr=127.0.0.1", "-m", "megarl.launch", *train]] * 2, {}


def _slurm(folder: Path, train: list[str]) -> Commands:
    """The batch script, with stand-ins for what Slurm itself would do."""
    for name, text in SLURM.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2"}
    return [["bash", "launch/slurm.sbatch", *train[1:]]], {"PATH": path, **job}


def _ray(folder: Path, train: list[str]) -> Commands:
    """A cluster of Ray's that is there before the run and stays: the command joins it."""
    port = free_port()
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=2"]
    start += ["--object-store-memory=100000000"]
    head = [*start, "--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    run = [sys.executable, "-m", "megarl.cli", *train, f"cluster.address=127.0.0.1:{port}", "cluster.nodes=2"]
    node = [*start, f"--address=127.0.0.1:{port}"]
    ready = f"until (echo > /dev/tcp/127.0.0.1/{port}) 2> /dev/null; do sleep 0.2; done; sleep 2; exec "
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return [["bash", "-c", ready + shlex.join(run)], head, ["bash", "-c", ready + shlex.join(node)]], token


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on one machine, and what it sampled."""
    folder = tmp_path_factory.mktemp("one")
    run = finished(folder / "one", *LEARNS, f"rollout.record={folder / 'rollouts.jsonl'}")
    return run.run_folder, folder / "rollouts.jsonl"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "pools"), [("torchrun", APART), ("slurm", APART), ("ray", APART), ("torchrun", CRITIC)],
    ids=["torchrun", "slurm", "ray", "torchrun, engine on the actor's ranks"],
)  # fmt: skip
def test_two_machines_do_what_one_does(
    way: str, pools: tuple[str, ...], alone: tuple[Path, Path], tmp_path: Path
) -> None:
    """The actor on two cores of one, the critic on one of the other, the engine on its other one or with the actor."""
    one, recording = alone
    with Machines(tmp_path, *LEARNS, *pools, f"rollout.replay={recording}", way=way) as two:
        if way == "ray":
            assert two.agents[0].wait(400) == 0, two.said[-3000:]
            assert [agent.poll() for agent in two.agents[1:]] == [None, None]  # the cluster is not the run's to end
        else:
            assert not any(two.codes(400)), two.said[-3000:]
    (folder,) = two.root.iterdir()
    check_same(one, folder, 1e-5)
    there = re.search(
        r"cores of the pools: actor: 2 on node (\d) .*; critic: 1 on node (\d)(?: .*; rollout: 1 on node (\d))?",
        two.said,
    )
    assert there, two.said[-3000:]
    actor, critic, engine = there.groups()
    assert critic != actor and engine == (critic if pools == APART else None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_fails_ends_on_all_machines(tmp_path: Path) -> None:
    settings = (*LEARNABLE, "data.eval=null", "run.steps=1000", "reshard.transport=distributed")
    with Machines(tmp_path, *settings) as two:
        two.until(lambda: any(file.stat().st_size for file in two.root.glob("*/metrics.jsonl")), 300)
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


def test_told_to_end_while_ray_starts(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_ray", interrupted)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")  # to have it back as it was
    store = torch.distributed.HashStore()
    assert launch._lead(store, 1, "127.0.0.1", ["train", "x.yaml"]) == 130
    assert capsys.readouterr().err == "megarl: interrupted\n" and store.get("exit") == b"130"


def test_settings_given_to_the_batch_script_win(tmp_path: Path) -> None:
    for name, text in {"scontrol": "echo node0", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node0", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}

    def submitted(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["bash", "launch/slurm.sbatch", *arguments]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    assert "CONFIG is missing: sbatch launch/slurm.sbatch CONFIG" in submitted().stderr
    done = submitted("a config.yaml", "checkpoint.every=5", "run.resume=runs/one")
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[told.index("train") + 1] == "a config.yaml"
    assert dict(one.split("=", 1) for one in told if "=" in one and not one.startswith("--")) == {
        "checkpoint.every": "5",
        "run.resume": "runs/one",
    }


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
