"""What each of the demo's choices is worth: a log-prob pass and an update of 64 samples, with one choice changed at a time.

    python -m benchmarks.choices [--rounds N] [--json FILE]

Every variant runs in a process of its own, in alternation; the first pass of each, which warms up, is left out. Rows are
seconds of the variant divided by seconds of the demo's own choice in the same round: above 1 the choice is right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.table import plain, text, write_json
from megarl.cpu import process_env

ALLOCATOR = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
# name -> (settings, environment variables left out)
VARIANTS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "the demo": ({}, ()),
    "float32 instead of bfloat16": ({"dtype": "float32"}, ()),
    "one thread instead of all cores": ({"threads": 1}, ()),
    "each sample with its own prompt": ({"share_prompts": False}, ()),
    "glibc's own malloc thresholds": ({}, ALLOCATOR),
    "threads that spin while they wait": ({}, ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")),
    "threads that sleep at once": ({}, ("GOMP_SPINCOUNT",)),
}
PASSES = 3


def measure(settings: dict[str, object]) -> list[float]:
    """Seconds of each pass, in this process."""
    import torch

    from megarl import models
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
        EngineSettings(
            str(settings.get("dtype", "bfloat16")),
            micro_batch_tokens=2048,
            share_prompts=bool(settings.get("share_prompts", True)),
        ),
        optimizer=OptimizerConfig(lr=1e-6),
        total_updates=10,
    )
    draw = torch.Generator().manual_seed(0)
    samples = []
    for group in range(8):
        prompt = torch.randint(0, 49152, (45,), generator=draw).tolist()
        for _ in range(8):
            response = torch.randint(
                0, 49152, (int(torch.randint(8, 17, (1,), generator=draw)),), generator=draw
            ).tolist()
            ones = [1] * len(response)
            samples.append(
                Sample(str(group), str(group), prompt, response, ones, [0.0] * len(response), "stop", 0, 0.0, {})
            )
    batch = Batch.from_samples(samples)
    batch = batch.set("advantages", torch.randn(int(batch.response_lengths.sum()), generator=draw), Level.RESPONSE)
    seconds = []
    for _ in range(PASSES + 1):
        begin = time.perf_counter()
        scores = engine.log_probs(batch, temperature=1.0)
        assert scores is not None
        ready = batch.set("old_log_probs", scores["log_probs"], Level.RESPONSE)
        engine.train(ready, Objective(), denominators(batch.padded("loss_mask")), temperature=1.0)
        seconds.append(time.perf_counter() - begin)
    parallel.stop()
    return seconds[1:]


def run_variant(name: str) -> list[float]:
    settings, without = VARIANTS[name]
    threads = int(str(settings.get("threads", os.cpu_count() or 1)))
    env = {**os.environ, **process_env(threads)}
    for variable in without:
        env.pop(variable, None)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.choices", "--measure", json.dumps(settings)]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(json.loads(args.measure))))
        return 0
    ratios: dict[str, list[float]] = defaultdict(list)
    base: list[float] = []
    for number in range(args.rounds):
        found = {}
        for name in VARIANTS:
            found[name] = median(run_variant(name))
            print(f"round {number + 1}: {name}: {found[name]:.2f} s", flush=True)
        base.append(found["the demo"])
        for name in list(VARIANTS)[1:]:
            ratios[name].append(found[name] / found["the demo"])
    rows = [plain(f"{name}: time ÷ the demo's", median(values)) for name, values in ratios.items()]
    rows.append(plain("the demo: seconds of log-probs and update of 64 samples", median(base)))
    print(text(rows))
    if args.json:
        write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
