"""Fifty steps of training in emulated float8, each recipe beside bfloat16: the same course?

    python -m benchmarks.fp8_emulated [--steps N] [--json FILE]

A tiny model learns an arithmetic sequence (next = 5·last + 7 mod 61) by cross-entropy, the same samples in the same order in
every run; only the numbers differ. What a difference means is measured too: bfloat16 again with other samples of the same kind.
A recipe must stay within half of that at every step, and end within a quarter of bfloat16's loss.
Emulated: inputs of the products are rounded as the recipe does it, the products themselves are float32.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

from benchmarks.table import Row, at_most, plain, text, write_json

SAMPLES, LENGTH, MODULUS = 16, 16, 61


def samples(step: int, seed: int) -> Any:
    import torch

    from megarl.batch import Batch, Level, Sample

    starts = torch.randint(0, MODULUS, (SAMPLES,), generator=torch.Generator().manual_seed(1000 * seed + step))
    made = []
    for index, token in enumerate(starts.tolist()):
        tokens = [token]
        for _ in range(LENGTH):
            tokens.append((5 * tokens[-1] + 7) % MODULUS)
        made.append(
            Sample(
                uid=str(index),
                group=str(index),
                prompt_ids=tokens[:1],
                response_ids=tokens[1:],
                loss_mask=[1] * LENGTH,
                rollout_log_probs=[0.0] * LENGTH,
                stop_reason="stop",
                weight_version=0,
            )
        )
    batch = Batch.from_samples(made).set("advantages", torch.ones(SAMPLES * LENGTH), Level.RESPONSE)
    return batch.set("old_log_probs", torch.zeros(SAMPLES * LENGTH), Level.RESPONSE)


def curve(folder: Path, place: Any, steps: int, *, recipe: str | None = None, seed: int = 0) -> list[float]:
    """Loss of every step. With advantages of 1 the loss `gpg` is cross-entropy."""
    from megarl.algorithms import Objective, denominators
    from megarl.config.schema import OptimizerConfig
    from megarl.megatron.emulate import emulate_fp8
    from megarl.megatron.engine import EngineSettings, MegatronEngine
    from megarl.megatron.precision import PrecisionSettings

    optimizer = OptimizerConfig(lr=3e-3, warmup_steps=5)
    engine = MegatronEngine(folder, place, EngineSettings("bfloat16"), optimizer=optimizer, total_updates=steps)
    if recipe is not None:
        emulate_fp8(engine.chunks[0], PrecisionSettings(fp8=recipe, fp8_backend="emulate"))
    losses = []
    for step in range(steps):
        batch = samples(step, seed)
        total = denominators(batch.padded("loss_mask"))
        losses.append(engine.train(batch, Objective(policy_loss="gpg"), total, temperature=1.0)["sum/loss"])
    return losses


def run(steps: int) -> list[Row]:
    import torch

    from megarl.megatron import parallel
    from megarl.megatron.precision import RECIPES, PrecisionSettings
    from megarl.models.tiny import make_tiny
    from megarl.roles.ports import unused_port

    torch.set_num_threads(1)
    place = parallel.start(0, 1, "127.0.0.1", unused_port(), tensor=1, pipeline=1, seed=1, timeout=60)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny("qwen3", Path(scratch) / "model", num_hidden_layers=4)
        base = torch.tensor(curve(folder, place, steps))
        others = [torch.tensor(curve(folder, place, steps, seed=seed)) for seed in (1, 2)]
        curves = {r: torch.tensor(curve(folder, place, steps, recipe=r)) for r in RECIPES}
    parallel.stop()
    spread = max(float((other - base).abs().max()) for other in others)
    shown = [*range(0, steps, 10), steps - 1]
    rows = [plain(f"bfloat16: loss of step {step}", float(base[step])) for step in shown]
    rows.append(plain("bfloat16, other samples: largest difference of the loss at a step", spread))
    for recipe, losses in curves.items():
        label = PrecisionSettings(fp8=recipe, fp8_backend="emulate").label
        rows += [plain(f"{label}: loss of step {step}", float(losses[step])) for step in shown]
        rows.append(
            at_most(
                f"{label}: largest difference of the loss at a step", float((losses - base).abs().max()), spread / 2
            )
        )
        ratio = float(losses[-10:].mean() / base[-10:].mean())
        rows.append(at_most(f"{label}: mean loss of the last ten steps ÷ bfloat16", ratio, 1.25))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # Megatron's, about what a machine without CUDA lacks
    rows = run(args.steps)
    print(text(rows))
    if args.json:
        write_json(args.json, rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
