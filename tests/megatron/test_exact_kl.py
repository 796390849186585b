"""The KL over distributions in the actor's loss: gradients equal to those of transformers' whole logits, on every layout."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch

from megarl.models.tiny import make_tiny
from tests.distributed import free_port, run_ranks
from tests.megatron.exact_kl_jobs import KINDS, Job, run_jobs, transformers_reference
from tests.megatron.harness import Layout, merge_elements


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact_kl")
    make_tiny("qwen3", folder / "policy", seed=1)
    make_tiny("qwen3", folder / "other", seed=2)
    for kind in KINDS:
        transformers_reference(folder / "policy", folder / "other", kind, folder / kind)
        coarse = folder / f"{kind} bfloat16"
        transformers_reference(folder / "policy", folder / "other", kind, coarse, torch.bfloat16, folder / kind)
    return folder


def job(folders: Path, layout: Layout, kind: str, *, same: bool = False, dtype: str = "float32") -> Job:
    policy = str(folders / "policy")
    other, want = (policy, None) if same else (str(folders / "other"), str(folders / kind))
    return Job(layout, kind, policy, other, want, free_port(), dtype)


def check(folders: Path, layout: Layout) -> None:
    answers = run_ranks(layout.world, run_jobs, [job(folders, layout, kind) for kind in KINDS])
    for at, kind in enumerate(KINDS):
        ranks = [answer[at] for answer in answers]
        want = torch.load(folders / kind, weights_only=False)
        found = {name: sum(r["sums"].get(f"sum/{name}", 0.0) for r in ranks if r["primary"]) for name in ("loss", "kl")}
        assert want["kl"] > 1e-3  # else nothing is compared
        assert found == pytest.approx({name: want[name] for name in found}, rel=1e-5, abs=1e-6), kind
        distances, elements = merge_elements([r["gradients"] for r in ranks])
        assert set(elements) == set(want["gradients"])
        assert max(distances.values()) < 1e-5, (kind, max(distances, key=lambda name: distances[name]), distances)
        assert max(r["padding"] for r in ranks) == 0.0


def test_gradients_are_those_of_whole_logits(folders: Path) -> None:
    check(folders, Layout(micro_batch_tokens=40, chunk=7))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2, sequence=True, chunk=7),
        Layout(pipeline=2, micro_batch_tokens=40),
        Layout(context=2, micro_batch_tokens=40),
        Layout(data=2, lopsided=True),
        Layout(tensor=2, pipeline=2),
        Layout(pipeline=2, virtual=2, micro_batch_tokens=40),
    ],
    ids=["tp2", "pp2", "cp2", "dp2", "tp2 pp2", "pp2 vpp2"],
)
def test_on_other_layouts(folders: Path, layout: Layout) -> None:
    check(folders, layout)


@pytest.mark.parametrize(
    "layout",
    [Layout(chunk=7), pytest.param(Layout(tensor=2, sequence=True), marks=pytest.mark.slow)],
    ids=["one", "tp2"],
)
def test_in_bfloat16_it_is_as_near_as_transformers(folders: Path, layout: Layout) -> None:
    """Hardly farther from float32 than transformers' own bfloat16: the loss's KL, and the gradients of all tensors."""
    jobs = [job(folders, layout, kind, dtype="bfloat16") for kind in KINDS]
    answers = run_ranks(layout.world, run_jobs, jobs)
    for at, kind in enumerate(KINDS):
        ranks = [answer[at] for answer in answers]
        want, coarse = (torch.load(folders / name, weights_only=False) for name in (kind, f"{kind} bfloat16"))
        distances, _ = merge_elements([r["gradients"] for r in ranks])
        theirs = {
            n: float((coarse["gradients"][n] - g).abs().max() / g.abs().max()) for n, g in want["gradients"].items()
        }
        matrices = [name for name, gradient in want["gradients"].items() if gradient.dim() == 2]
        assert 1e-4 < max(distances[n] for n in matrices) < 2 * max(theirs.values()), (kind, distances, theirs)
        # A norm's few numbers may be off by luck, on one kind of processor or another: all tensors together are not.
        mean, their_mean = fmean(distances.values()), fmean(theirs.values())
        assert mean < 1.5 * their_mean and max(distances.values()) < 4 * max(theirs.values()), (kind, distances, theirs)
        kl = sum(r["sums"].get("sum/kl", 0.0) for r in ranks if r["primary"])
        # One number, whose error may be near 0 by luck: beside that of what it is made of.
        assert abs(kl / want["kl"] - 1) < 2 * max(abs(coarse["kl"] / want["kl"] - 1), *theirs.values()), kind


def test_a_model_learns_nothing_from_itself(folders: Path) -> None:
    jobs = [job(folders, Layout(micro_batch_tokens=40), kind, same=True) for kind in KINDS]
    for report in run_ranks(1, run_jobs, jobs)[0]:
        assert report["sums"]["sum/kl"] == 0.0
        assert report["largest"] == 0.0
