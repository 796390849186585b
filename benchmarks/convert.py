"""Conversion beside `cp` of the same files: how many bytes a second, and how much memory.

    python -m benchmarks.convert [--only smollm2|llama-2gb] [--rounds N] [--where DIR] [--json FILE]

In every round, the page cache warm: `cp` of the Hugging Face weights, their conversion to a torch_dist checkpoint, `cp` of that
checkpoint, its conversion back. A conversion is a process of its own; its time is that of the call, without the start of Python and
the import of torch (about two seconds, told beside). As `cp`, it does not wait for the disk. A second conversion does (`--sync`), and
so does a second `cp`, which is followed by `sync` of its files: its ratio to the first is what the disk lets anybody reach who waits.
The ratio is that of the times within a round, its median over the rounds.
Peak memory is the process's, mapped files included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.table import Row, at_least, at_most, plain, text, write_json

GOAL = 0.5
GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 18,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def llama(folder: Path) -> Path:
    """A random Llama of 2 GB, in files of 500 MB."""
    import torch

    from megarl.bridge.hf_io import HFWriter
    from megarl.bridge.model_map import ModelMap

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    shapes = ModelMap.from_hf(LLAMA).hf_shapes
    noise = torch.randn(max(torch.Size(shape).numel() for shape in shapes.values()) + 4099).bfloat16()
    with HFWriter(folder, shapes, torch.bfloat16, 500_000_000) as writer:
        for number, (name, shape) in enumerate(shapes.items()):
            start = number % 4099
            writer.write(name, noise[start : start + torch.Size(shape).numel()].view(shape))
    return folder


def smollm2(folder: Path) -> Path:
    from megarl import models

    return models.resolve("smollm2")


MODELS = {"smollm2": smollm2, "llama-2gb": llama}


def weights(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.distcp")])


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in weights(folder))


def copied(source: Path, scratch: Path, *, sync: bool) -> float:
    """Seconds that `cp` takes."""
    target = scratch / "copy"
    target.mkdir()
    begin = time.perf_counter()
    subprocess.run(["cp", *weights(source), target], check=True)
    if sync:
        subprocess.run(["sync", *weights(target)], check=True)
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return seconds


def converted(direction: str, source: Path, target: Path, *, sync: bool) -> dict[str, float]:
    """A conversion in a process of its own: its seconds, all of the process's, its peak memory (bytes)."""
    shutil.rmtree(target, ignore_errors=True)
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.convert", "--one", direction, source, target, str(int(sync))],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return {**json.loads(done.stdout), "whole": time.perf_counter() - begin}


def one(direction: str, source: str, target: str, sync: str) -> None:
    """The process of one conversion."""
    from megarl.convert.hf_to_megatron import hf_to_megatron
    from megarl.convert.megatron_to_hf import megatron_to_hf
    from megarl.convert.work import Options

    importlib.import_module("torch.distributed.checkpoint")  # the longest part of the start
    convert = {"hf-to-megatron": hf_to_megatron, "megatron-to-hf": megatron_to_hf}[direction]
    begin = time.perf_counter()
    convert(Path(source), Path(target), Options(durable=sync == "1"), show=False)
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "peak": peak_memory()}))


def peak_memory() -> int:
    """Bytes. (ru_maxrss would be that of the parent, where it had more when it forked.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def warm(folder: Path) -> None:
    for path in weights(folder):
        with path.open("rb") as file:
            while file.read(16 << 20):
                pass


def measured(name: str, rounds: int, scratch: Path) -> list[Row]:
    from megarl.bridge.model_map import ModelMap
    from megarl.convert.verify import verify

    hf = MODELS[name](scratch / name)
    shapes = ModelMap.from_hf(hf).hf_shapes
    largest = 2 * max(math.prod(shape) for shape in shapes.values())  # bfloat16
    checkpoint, back = scratch / "checkpoint", scratch / "back"
    found: defaultdict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = {"to": [], "from": [], "cp": []}
    for _ in range(rounds):
        for way, direction, source, target in (
            ("to", "hf-to-megatron", hf, checkpoint),
            ("from", "megatron-to-hf", checkpoint, back),
        ):
            warm(source)
            cp, synced = (copied(source, scratch, sync=sync) for sync in (False, True))
            waited = converted(direction, source, target, sync=True)
            ours = converted(direction, source, target, sync=False)
            found[way].append(cp / ours["seconds"])
            found[f"{way} sync"].append(synced / waited["seconds"])
            found["disk"].append(cp / synced)
            found["peak"].append(ours["peak"])
            found["start"].append(ours["whole"] - ours["seconds"])
            rates[way].append(size(source) / ours["seconds"] / 1e9)
            rates["cp"].append(size(source) / cp / 1e9)
    result = verify(hf, back, show=False)
    assert not result.differences, result.differences
    middle = statistics.median
    return [
        at_least(f"{name}: Hugging Face to Megatron, bytes/s of cp", middle(found["to"]), GOAL),
        at_least(f"{name}: Megatron to Hugging Face, bytes/s of cp", middle(found["from"]), GOAL),
        plain(f"{name}: cp and sync, bytes/s of cp", middle(found["disk"])),
        at_least(f"{name}: to Megatron with --sync, of cp and sync", middle(found["to sync"]), GOAL),
        at_least(f"{name}: to Hugging Face with --sync, of cp and sync", middle(found["from sync"]), GOAL),
        at_most(
            f"{name}: peak memory / (2 × the largest tensor + 1 GiB)", max(found["peak"]) / (2 * largest + GIB), 1.0
        ),
        plain(f"{name}: peak memory, GiB", max(found["peak"]) / GIB),
        plain(f"{name}: to Megatron, GB/s", middle(rates["to"])),
        plain(f"{name}: to Hugging Face, GB/s", middle(rates["from"])),
        plain(f"{name}: cp, GB/s", middle(rates["cp"])),
        plain(f"{name}: start of the process, s", middle(found["start"])),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--where", type=Path, help="a folder on the disk to measure (default: the system's temporary one)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(*args.one)
        return 0
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command does
    rows: list[Row] = []
    for name in [args.only] if args.only else MODELS:
        with tempfile.TemporaryDirectory(dir=args.where) as scratch:
            rows += measured(name, args.rounds, Path(scratch))
    print(text(rows))
    if args.json:
        write_json(args.json, rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
