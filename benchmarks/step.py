"""One training step of the demo beside TRL's GRPOTrainer: same model, task, samples and machine, in alternation.

    python -m benchmarks.step [--rounds N] [--steps N] [--json FILE]

TRL runs in an environment of its own, made in the cache on first use. Each round runs both for a few steps; the first step of
each, which warms up, is left out. What counts is the ratio of samples a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.table import at_least, plain, text, write_json
from megarl import models
from megarl.cpu import process_env
from megarl.models.cache import cache_dir

ROOT = Path(__file__).parents[1]
SAMPLES = 64
TRL = ("torch==2.13.0", "trl==1.16.0", "transformers==5.19.0", "reasoning-gym==0.1.25")


def trl_python() -> Path:
    """The interpreter of TRL's environment."""
    folder = cache_dir() / "bench-trl"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists() or stamp.read_text() != "\n".join(TRL):
        print(f"making an environment with TRL in {folder} …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *TRL], check=True)
        stamp.write_text("\n".join(TRL))
    return python


def trl_seconds(steps: int, scratch: Path) -> list[float]:
    # The same allocator settings that megarl gives its own processes: the peer is not to lose by its defaults.
    env = {**os.environ, **process_env(os.cpu_count() or 1), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [
            str(trl_python()),
            str(ROOT / "benchmarks/peers/trl_step.py"),
            str(models.resolve("smollm2")),
            str(steps),
            str(scratch),
        ],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    return [line["seconds"] for line in lines][1:]


def megarl_seconds(steps: int, scratch: Path) -> list[float]:
    overrides = [
        "data.eval=null",
        "export.hf=false",
        "observe.samples_every=0",
        f"run.root={scratch}",
        f"run.steps={steps}",
    ]
    subprocess.run(
        [sys.executable, "-m", "megarl.cli", "train", str(ROOT / "configs/demo.yaml"), *overrides],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (metrics,) = scratch.glob("*/metrics.jsonl")
    return [json.loads(line)["time/step"] for line in metrics.read_text().splitlines()][1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"megarl": [], "trl": []}
    for number in range(args.rounds):
        for name, run in (("megarl", megarl_seconds), ("trl", trl_seconds)):
            with tempfile.TemporaryDirectory() as scratch:
                new = run(args.steps, Path(scratch))
            seconds[name] += new
            print(f"round {number + 1}: {name} {median(new):.1f} s a step of {SAMPLES} samples", flush=True)
    ratio = median(seconds["trl"]) / median(seconds["megarl"])
    rows = [at_least("samples/s of a step, megarl ÷ TRL", ratio, 1.5)]
    rows += [plain(f"{name}: seconds a step of {SAMPLES} samples", median(values)) for name, values in seconds.items()]
    print(text(rows))
    if args.json:
        write_json(args.json, rows)
    return 0 if rows[0].met else 1


if __name__ == "__main__":
    raise SystemExit(main())
