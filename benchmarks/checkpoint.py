"""What a checkpoint costs a training step, written while the step waits and while it goes on, and the write beside `cp`.

    python -m benchmarks.checkpoint [--rounds N] [--tokens N] [--threads N] [--json FILE]

SmolLM2-135M in bfloat16 with float32 master weights and Adam on one rank: 1.9 GB. A step is log-probs and an update of `--tokens`
packed tokens (about what the demo has). In each round, in alternation: two steps without a checkpoint; two during which one is
written (`checkpoint.asynchronous`), its beginning and end counted; two after one was written. What a checkpoint costs is what the two
steps take longer, in steps. Two cores have no third that could write: what training threads leave is all there is.

`cp` and `sync` of the same files stand beside the write that is waited for, which ends when the bytes are on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.table import Row, at_least, at_most, plain, text, write_json
from benchmarks.train_step import samples
from megarl import models
from megarl.cpu import process_env

STEPS = 2  # of which one checkpoint is written meanwhile


def trainer(tokens: int) -> tuple[Any, Callable[[], None]]:
    """An engine, and its step."""
    from megarl.algorithms import Objective, denominators
    from megarl.batch import Batch, Level, Sample
    from megarl.config.schema import OptimizerConfig
    from megarl.megatron import parallel
    from megarl.megatron.engine import EngineSettings, MegatronEngine
    from megarl.roles.ports import unused_port

    place = parallel.start(0, 1, "127.0.0.1", unused_port(), tensor=1, pipeline=1, seed=1)
    engine = MegatronEngine(
        models.resolve("smollm2"),
        place,
        EngineSettings("bfloat16", micro_batch_tokens=2048, share_prompts=False),
        optimizer=OptimizerConfig(lr=1e-9),
        total_updates=10**6,
    )
    rows = [
        Sample(str(i), str(i), p, r, [1] * len(r), [0.0] * len(r), "stop", 0, 0.0, {})
        for i, (p, r) in enumerate(samples(tokens))
    ]
    batch = Batch.from_samples(rows)
    totals = denominators(batch.padded("loss_mask"))

    def step() -> None:
        done = engine.log_probs(batch, temperature=1.0)
        whole = batch.set("old_log_probs", done["log_probs"], Level.RESPONSE)
        engine.train(whole.set("advantages", done["log_probs"], Level.RESPONSE), Objective(), totals)

    return engine, step


def measure(scratch: Path, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds by what was done, of each round; in a process of its own."""
    from megarl.megatron import dist_checkpoint

    engine, step = trainer(tokens)
    copies = dist_checkpoint.Copies()
    engine.memory.before_change = copies.settle
    target = scratch / "checkpoint"
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(what: str, act: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        answer = act()
        seconds[what].append(time.perf_counter() - begin)
        return answer

    def begin() -> Any:
        return dist_checkpoint.begin(target, engine.chunks, optimizer=engine.optimizer, copies=copies)

    def asynchronous() -> None:
        writing = timed("copying", begin)
        steps()
        timed("waiting at the end", writing.finish)

    def steps() -> None:
        for _ in range(STEPS):
            step()

    def write() -> None:
        dist_checkpoint.save(target, engine.chunks, optimizer=engine.optimizer)

    def synchronous() -> None:
        timed("write", write)
        steps()

    step()
    begin().finish()  # fresh pages, once
    seconds["bytes"] = [float(sum(path.stat().st_size for path in target.iterdir()))]
    ways: list[tuple[str, Callable[[], None]]]
    ways = [("without", steps), ("asynchronous", asynchronous), ("synchronous", synchronous)]
    for number in range(rounds):
        shift = number % len(ways)
        for what, act in ways[shift:] + ways[:shift]:
            if act is not steps:
                shutil.rmtree(target)
            timed(what, act)
        copy = scratch / "copy"
        copy.mkdir()
        files = sorted(target.iterdir())
        timed("cp and sync", lambda files=files, copy=copy: _cp(files, copy))
        shutil.rmtree(copy)
    return dict(seconds)


def _cp(files: list[Path], target: Path) -> None:
    subprocess.run(["cp", *files, target], check=True)
    subprocess.run(["sync", *(target / file.name for file in files)], check=True)


def rows_of(found: dict[str, list[float]]) -> list[Row]:
    def cost(what: str) -> float:
        return median((a - b) / (b / STEPS) for a, b in zip(found[what], found["without"], strict=True))

    share = median(a / b for a, b in zip(found["cp and sync"], found["write"], strict=True))
    rows = [
        at_most("a checkpoint written meanwhile: its cost, in steps", cost("asynchronous"), 0.05),
        plain("a checkpoint that is waited for: its cost, in steps", cost("synchronous")),
        at_least("its bytes a second ÷ those of cp and sync", share, 0.5),
        plain("gigabytes", found["bytes"][0] / 1e9),
        plain("seconds of a step", median(found["without"]) / STEPS),
    ]
    names = ("copying", "waiting at the end", "write", "cp and sync")
    return rows + [plain(f"seconds: {name}", median(found[name])) for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.tokens, args.rounds)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.checkpoint", "--measure", scratch]
        command += [f"--rounds={args.rounds}", f"--tokens={args.tokens}"]
        env = {**os.environ, **process_env(args.threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    rows = rows_of(json.loads(done.stdout.splitlines()[-1]))
    print(text(rows))
    if args.json:
        write_json(args.json, rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
