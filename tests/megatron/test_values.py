"""A model with a score head on one rank: which token a score is taken from, biases, bfloat16, roles that take turns on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.batch import Batch, Level
from megarl.bridge.heads import Head
from megarl.megatron.valued import closing
from megarl.models.heads import make_tiny_reward, make_tiny_trl
from megarl.models.tiny import make_tiny
from tests.distributed import free_port, run_ranks
from tests.megatron.harness import random_batch
from tests.megatron.valued_jobs import PAD, sequences


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank found out, about everything that needs Megatron."""
    folder = tmp_path_factory.mktemp("values")
    make_tiny("qwen3", folder / "policy")
    make_tiny_reward("qwen3", folder / "many", labels=3)
    make_tiny_reward("llama", folder / "biased", bias=True)
    make_tiny_trl("llama", folder / "trl", prefix="pretrained_model.")
    return run_ranks(1, look, str(folder), free_port())[0]


def look(rank: int, world: int, port: int, folder: str, meeting: int) -> dict[str, Any]:
    from megarl.megatron import parallel

    torch.set_num_threads(1)
    place = parallel.start(rank, world, "127.0.0.1", meeting, tensor=1, pipeline=1, seed=1, timeout=120)
    tests = (biased_values, several_labels, bfloat16, fresh_head, nothing_to_score, turns, frozen_storage)
    result = {test.__name__: test(Path(folder), place) for test in tests}
    parallel.stop()
    return result


def engine(folder: Path, place: Any, head: Head | None = None, dtype: str = "float32", **optimizer: Any) -> Any:
    from megarl.bridge.head_io import stored_head
    from megarl.config.schema import OptimizerConfig
    from megarl.megatron.engine import EngineSettings
    from megarl.megatron.valued import ValueEngine

    settings = EngineSettings(dtype, micro_batch_tokens=60)
    learns = OptimizerConfig(**optimizer) if optimizer else None
    return ValueEngine(folder, place, settings, head or stored_head(folder), optimizer=learns, total_updates=5)


def transformers_values(folder: Path, batch: Batch) -> torch.Tensor:
    """(R, K) of a token classifier, sequence by sequence."""
    import transformers

    model = transformers.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    values = []
    with torch.no_grad():
        rows = batch["tokens"].split(batch.total_lengths.tolist())
        for row, prompt in zip(rows, batch.prompt_lengths.tolist(), strict=True):
            values.append(model(row[None]).logits[0, prompt - 1 : -1])
    return torch.cat(values)


def biased_values(folder: Path, place: Any) -> dict[str, float]:
    """Heads with a bias: a token classifier, and trl's value head, exported as one and read by transformers."""
    from megarl.bridge.head_io import save_head_hf

    batch = random_batch(419)
    ours = engine(folder / "biased", place).values(batch)["values"]
    apart = {"token classifier": float((ours - transformers_values(folder / "biased", batch)[:, 0]).abs().max())}
    critic = engine(folder / "trl", place)
    tensors = {}
    for parameter, tensor in critic.parameters():
        for copy in parameter.copies(place):
            shape = dict(zip(parameter.hf_names, parameter.hf_shapes, strict=True))[copy.hf_name]
            tensors.setdefault(copy.hf_name, torch.empty(shape))[copy.hf] = tensor.detach()[copy.local]
    again = save_head_hf(folder / "trl-again", tensors.items(), folder / "trl", critic.head, dtype=torch.float32)
    ours = critic.values(batch)["values"]
    assert ours.std() > 0.3
    return apart | {"trl": float((ours - transformers_values(again, batch)[:, 0]).abs().max())}


def several_labels(folder: Path, place: Any) -> dict[str, Any]:
    batch = sequences(419)
    model = engine(folder / "many", place)
    values, scores = model.values(batch)["values"], model.scores(batch)["scores"]
    alone = torch.cat([model.scores(batch.take([at]))["scores"] for at in range(len(batch))])
    return {"values": tuple(values.shape), "scores": tuple(scores.shape), "apart": float((alone - scores).abs().max())}


def bfloat16(folder: Path, place: Any) -> dict[str, Any]:
    batch = sequences(419)
    whole = engine(folder / "many", place).scores(batch)["scores"]
    half = engine(folder / "many", place, dtype="bfloat16")
    scores = half.scores(batch)["scores"]
    kept = stage_head(half).weight.dtype
    return {"dtype": str(scores.dtype), "weights": str(kept), "apart": float((scores - whole).abs().max())}


def stage_head(model: Any) -> Any:
    from megarl.megatron.model import unwrap

    return unwrap(model.chunks[-1]).score_head


def fresh_head(folder: Path, place: Any) -> dict[str, Any]:
    """All values begin at 0; then head and body learn."""
    critic = engine(folder / "policy", place, Head(fresh=True), lr=1e-2, clip_grad=0.0)
    batch, seen = learnable(), []
    for _ in range(3):
        seen.append(critic.values(batch)["values"])
        learn(critic, batch)
    return {"first": float(seen[0].abs().max()), "moved": [float((v - batch["returns"]).square().mean()) for v in seen]}


def learnable() -> Batch:
    batch = random_batch(419)
    size = int(batch.response_lengths.sum())
    target = torch.randn(size, generator=torch.Generator().manual_seed(1)) + 1.0
    return batch.set("returns", target, Level.RESPONSE).set("values", torch.zeros(size), Level.RESPONSE)


def learn(critic: Any, batch: Batch) -> None:
    from megarl.algorithms import denominators
    from megarl.algorithms.value_loss import ValueObjective

    critic.train(batch, ValueObjective(value_clip=None), denominators(batch.padded("loss_mask")))


def nothing_to_score(folder: Path, place: Any) -> tuple[int, ...]:
    """A rank whose share of the samples is empty."""
    return tuple(engine(folder / "many", place).scores(random_batch(419).take([]))["scores"].shape)


def turns(folder: Path, place: Any) -> dict[str, Any]:
    """Two roles take turns on a device: their numbers are those without, whoever was away in between."""
    from megarl.roles.hosted import Hosted

    def run(offload: str) -> tuple[Any, dict[str, float], list[tuple[str, ...]]]:
        critic = engine(folder / "policy", place, Head(fresh=True, std=0.1), lr=1e-2)
        reward = engine(folder / "many", place)
        for role in (critic, reward):
            role.memory.even_on_cpu = True
        roles = Hosted({"critic": critic, "reward_model": reward}, {"critic": offload, "reward_model": offload})
        batch, away = learnable(), []
        for _ in range(2):
            with roles.looking("reward_model") as model:
                scores = model.scores(batch)["scores"]
                away.append(critic.memory.away)
            with roles.learning("critic") as model:
                learn(model, batch)
                away.append(reward.memory.away)
        with roles.looking("critic") as model:
            values = model.values(batch)["values"]
        moved = roles.rest()
        assert roles.rest() == {}
        return torch.cat([values, scores.flatten()]), moved, [*away, critic.memory.away]

    plain, none, _ = run("none")
    result: dict[str, Any] = {"none": none}
    for offload in ("optimizer", "all"):
        numbers, moved, away = run(offload)
        result[offload] = (bool(torch.equal(numbers, plain)), moved, away)
    return result


def frozen_storage(folder: Path, place: Any) -> dict[str, Any]:
    """A reference shares with its actor what the actor never changes, and nothing else."""
    from megarl.config.schema import OptimizerConfig
    from megarl.megatron.engine import EngineSettings, MegatronEngine
    from megarl.roles.building import share_frozen

    settings = EngineSettings("float32")
    optimizer = OptimizerConfig(lr=1e-2, frozen=["model.embed_tokens.*", "*.layers.1.*"])
    actor = MegatronEngine(folder / "policy", place, settings, optimizer=optimizer)
    reference = MegatronEngine(folder / "policy", place, settings)
    before = reference.log_probs(random_batch(419), temperature=1.0)["log_probs"]
    spared = share_frozen(actor, reference)
    theirs = {parameter.name: tensor for parameter, tensor in reference.parameters()}
    shared = {p.name for p, tensor in actor.parameters() if theirs[p.name].data_ptr() == tensor.data_ptr()}
    frozen = {p.name for p, tensor in actor.parameters() if not tensor.requires_grad}
    size = sum(tensor.numel() * 4 for p, tensor in actor.parameters() if p.name in frozen)
    with torch.no_grad():
        for _, tensor in actor.parameters():
            if tensor.requires_grad:
                tensor += 1.0  # what the actor learns is no business of the reference
    after = reference.log_probs(random_batch(419), temperature=1.0)["log_probs"]
    return {"right": shared == frozen and len(frozen) > 5 and spared == size, "same": bool(torch.equal(before, after))}


def test_biases_count(found: dict[str, Any]) -> None:
    assert found["biased_values"]["token classifier"] < 1e-5 and found["biased_values"]["trl"] < 1e-5


def test_several_labels_have_a_score_each_whatever_is_scored_beside(found: dict[str, Any]) -> None:
    tokens = int(sequences(419).response_lengths.sum())
    assert found["several_labels"]["values"] == (tokens, 3) and found["several_labels"]["scores"] == (12, 3)
    assert found["several_labels"]["apart"] < 1e-5
    assert found["nothing_to_score"] == (0, 3)


def test_scores_are_float32_over_weights_in_bfloat16(found: dict[str, Any]) -> None:
    assert found["bfloat16"]["dtype"] == "torch.float32" and found["bfloat16"]["weights"] == "torch.bfloat16"
    assert 0 < found["bfloat16"]["apart"] < 0.1


def test_a_fresh_head_begins_at_zero_and_learns(found: dict[str, Any]) -> None:
    assert found["fresh_head"]["first"] == 0.0
    errors = found["fresh_head"]["moved"]
    assert errors[2] < errors[1] < errors[0]


def test_roles_that_take_turns_compute_the_same(found: dict[str, Any]) -> None:
    turns = found["turns"]
    assert turns["none"] == {}
    equal, moved, away = turns["optimizer"]
    assert equal and moved["offload/gigabytes"] > 0 and moved["offload/seconds"] > 0
    # In turns: of the critic while the other scores, of the reward model, which has neither, while the critic learns.
    assert away[1:] == [(), ("gradients", "optimizer"), (), ("gradients", "optimizer")]
    equal, moved, away = turns["all"]
    assert equal and moved["offload/gigabytes"] > turns["optimizer"][1]["offload/gigabytes"]
    everything = ("parameters", "gradients", "optimizer")
    assert away[1:] == [("parameters",), everything, ("parameters",), everything]


def test_a_reference_shares_what_the_actor_has_frozen(found: dict[str, Any]) -> None:
    assert found["frozen_storage"] == {"right": True, "same": True}


def test_a_score_is_taken_after_the_last_token_that_is_no_padding() -> None:
    batch = sequences(419)
    rows = batch["tokens"].split(batch.total_lengths.tolist())
    closed = closing(batch, PAD)
    for at, row in enumerate(closed["tokens"].split(closed.total_lengths.tolist())):
        kept = row[:-1]
        assert kept[-1] != PAD and torch.equal(kept, rows[at][: len(kept)])
        assert (rows[at][len(kept) :] == PAD).all()
        assert closed.response_lengths[at] >= 1
        assert closed.prompt_lengths[at] == min(int(batch.prompt_lengths[at]), len(kept))
    shorter = (closed.total_lengths - 1 < batch.total_lengths).nonzero()[:, 0].tolist()
    assert shorter == [3, 4, 6, 11]  # the last by chance; number 8, with padding within, is whole
    whole = closing(batch, None)
    assert torch.equal(whole.total_lengths, batch.total_lengths + 1)
    alone = Batch(torch.tensor([2]), torch.tensor([1])).set("tokens", torch.full((3,), PAD), Level.SEQUENCE)
    assert closing(alone, PAD).total_lengths.tolist() == [2]  # of nothing but padding the first, as transformers
