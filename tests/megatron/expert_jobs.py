"""What a router does on a real rank, compared with transformers there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import Objective, denominators
from megarl.batch import Level
from tests.megatron.harness import (
    OPTIMIZER,
    Layout,
    before_update,
    compare_gradients,
    engine_settings,
    gradients_of,
    joined,
    load_transformers,
    random_batch,
    share,
)
from tests.megatron.layouts import Job


def choices(rank: int, world: int, port: int, folders: list[str], meetings: list[int]) -> list[dict[str, Any]]:
    """Of each model: how many tokens go to other experts than in transformers; and the dtype of a bfloat16 model's bias."""
    reports = []
    for folder, meeting in zip(folders, meetings, strict=True):
        with joined(rank, world, Layout(), meeting) as place:
            reports.append(_choices(place, folder))
    return reports


def _choices(place: Any, folder: str) -> dict[str, Any]:
    from megarl.megatron.engine import EngineSettings, MegatronEngine
    from megarl.megatron.model import unwrap

    engine = MegatronEngine(Path(folder), place, EngineSettings("float32", share_prompts=False))
    routers = [m for m in unwrap(engine.chunks[0]).modules() if type(m).__name__ == "BalancingRouter"]
    ours: dict[int, torch.Tensor] = {}
    for number, router in enumerate(routers):
        router.register_forward_hook(lambda _, __, out, n=number: ours.__setitem__(n, out[0]))
    batch = random_batch(engine.map.dims.vocab)
    engine.log_probs(batch, temperature=1.0)

    model = load_transformers("CausalLM", Path(folder))
    theirs: dict[int, list[torch.Tensor]] = {n: [] for n in range(len(routers))}
    gates = [m for name, m in model.named_modules() if name.endswith(".gate")]
    for number, gate in enumerate(gates):
        gate.register_forward_hook(lambda _, __, out, n=number: theirs[n].append(_dense(out, engine.map.dims.experts)))
    rows = batch["tokens"].split(batch.total_lengths.tolist())
    with torch.no_grad():
        for row in (rows[i] for part in engine._plan(batch) for i in part):
            model(row[None, : max(len(row) - 1, 1)])
    pairs = [(ours[n], torch.cat(theirs[n])) for n in range(len(routers))]
    report = {
        "layers": len(pairs),
        "tokens": len(pairs[0][0]),
        "differing choices": sum(int(((a > 0) != (b > 0)).any(dim=1).sum()) for a, b in pairs),
        "weights": max(float((a - b).abs().max()) for a, b in pairs),
    }

    half = MegatronEngine(Path(folder), place, EngineSettings("bfloat16"))
    biases = [(p, t) for p, t in half.parameters() if p.float32]
    whole = {p.name: t for p, t in engine.parameters()}
    report["bias dtype"] = str(biases[0][1].dtype) if biases else "none"
    report["bias lost"] = max((float((t - whole[p.name]).abs().max()) for p, t in biases), default=0.0)
    return report


def _dense(out: tuple[torch.Tensor, ...], experts: int) -> torch.Tensor:
    """(T, E) weights of the chosen experts, 0 elsewhere."""
    _, weights, chosen = out
    return torch.zeros(len(chosen), experts).scatter_(1, chosen, weights.float())


AUX, Z = 0.3, 0.2
SILENT = Objective(
    clip_low=0.2, clip_high=0.2, clip_dual=3.0, entropy_coefficient=0.0
)  # with advantages of 0: no gradient


def balancing_reference(folder: Path, file: Path) -> None:
    """The balancing losses alone by transformers, sequence by sequence as their definition is written, and every gradient."""
    model = load_transformers("CausalLM", folder)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(lambda _, __, out: seen.append((out[0], out[2])))
    batch = random_batch(model.config.vocab_size)
    has_loss = [bool(row.any()) for row in batch.padded("loss_mask")]
    total, values = torch.zeros(()), torch.zeros(2, dtype=torch.float64)
    for row, counts in zip(batch["tokens"].split(batch.total_lengths.tolist()), has_loss, strict=True):
        seen.clear()
        model(row[None, : max(len(row) - 1, 1)])
        for logits, chosen in seen:
            tokens, experts = logits.shape
            p = torch.softmax(logits, dim=-1)
            if model.config.model_type == "deepseek_v3":
                p = torch.sigmoid(logits) / torch.sigmoid(logits).sum(dim=-1, keepdim=True)
            f = torch.bincount(chosen.flatten(), minlength=experts) * experts / (chosen.shape[1] * tokens)
            balance, z = (f * p.mean(dim=0)).sum(), torch.logsumexp(logits, dim=-1).square().mean()
            total = total + (AUX * balance + Z * z) * counts / sum(has_loss)
            values += torch.stack([balance, z]).detach() * counts / sum(has_loss) / len(seen)
    total.backward()
    batch = batch.set("advantages", torch.zeros(int(batch.response_lengths.sum())), Level.RESPONSE)
    batch = batch.set("old_log_probs", torch.zeros(int(batch.response_lengths.sum())), Level.RESPONSE)
    torch.save({"batch": batch, "gradients": gradients_of(model), "losses": values.tolist()}, file)


def balancing(rank: int, world: int, port: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Job by job: every gradient of the balancing losses on this rank, name -> [distance from the reference, elements]; and both
    losses as reported, of a primary rank."""
    found = []
    for job in jobs:
        with joined(rank, world, job.layout, job.port) as place:
            found.append(_balancing(place, job))
    return found


def _balancing(place: Any, job: Job) -> dict[str, Any]:
    from megarl.megatron.engine import MegatronEngine

    want = torch.load(job.reference, weights_only=False)
    settings = engine_settings(job.layout, aux_loss=AUX, z_loss=Z)
    engine = MegatronEngine(Path(job.folder), place, settings, optimizer=OPTIMIZER, total_updates=10)
    found: dict[str, list] = {}
    before_update(engine, lambda: found.update(compare_gradients(engine, want["gradients"], {"padding": 0.0})))
    batch = want["batch"]
    mine = share(batch, job.layout, place)
    said = engine.train(batch.take(mine), SILENT, denominators(batch.padded("loss_mask")), temperature=1.0)
    losses = [said["sum/moe/aux_loss"], said["sum/moe/z_loss"]] if place.primary else None
    return {"gradients": found, "losses": losses}
