"""A real engine on a tiny model: what it samples, what it says about it, and how it takes new weights."""

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file

from megarl.batch.sample import Prompt
from megarl.errors import RunError, UserError
from megarl.reshard.bucket import BucketSpec, BucketTensor
from megarl.reshard.exposure import meeting
from megarl.reshard.fingerprint import fingerprint
from megarl.rollout.group import begin
from megarl.rollout.sampling import Ask, Sampling

PROMPTS = [
    Prompt("a", [5, 6, 7, 8], answer="x", payload={"k": 1}),
    Prompt("b", [10] * 20),
    Prompt("c", list(range(100, 140))),
    Prompt("d", [9]),
]


def tensors_of(folder):
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def buckets(tensors, directory, count=3, verify=True):
    names = list(tensors)
    for index in range(count):
        part = names[index::count]
        spec = BucketSpec.plan(
            str(directory / f"bucket{index % 2}"),
            [(n, tensors[n].dtype, tuple(tensors[n].shape)) for n in part],
            part if verify else (),
        )
        spec.create()
        for name, view in spec.views().items():
            view.copy_(tensors[name])
        yield spec


def update(engine, tensors, directory, version, **options):
    engine.begin_update(version)
    for spec in buckets(tensors, directory, **options):
        engine.load_buckets([spec])
    return engine.end_update()


def expose(engine, tensors, directory):
    """Where all weights of an engine lie, after an update to `tensors` by buckets."""
    engine.begin_update(1)
    for spec in buckets(tensors, directory):
        engine.load_buckets([spec])
    exposures = engine.expose([BucketTensor(n, "float32", tuple(t.shape), 0) for n, t in tensors.items()])
    engine.end_update()
    return exposures


def fill(engine, exposures, tensors):
    """An update in place; the fingerprints that the engine took."""
    engine.begin_update(2)
    for exposure in exposures:
        views = exposure.views()
        assert views.keys() <= tensors.keys()
        for name, spot in exposure.spots.items():
            here, there = meeting([slice(0, size) for size in tensors[name].shape], spot.origin, spot.shape)
            views[name][there].copy_(tensors[name][here])
    return engine.end_update(list(tensors))


@pytest.fixture
def shared(tmp_path_factory):
    import shutil
    import tempfile
    from pathlib import Path

    path = Path(tempfile.mkdtemp(prefix="megarl-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def restored(engine, folder, shared):
    """Whatever a test does to the weights, the next one finds the folder's, version 0."""
    yield engine
    with contextlib.suppress(RunError):
        engine.end_update()
    update(engine, tensors_of(folder), shared, 0)


def worst(samples, path, reference, temperature=1.0):
    return max(
        max(abs(got - exact) for got, exact in zip(s.rollout_log_probs, expected.tolist(), strict=True))
        for s in samples
        for expected in [reference(path, s.prompt_ids, s.response_ids, temperature)]
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_are_those_of_transformers(engine, folder, reference, temperature):
    samples = engine.generate(PROMPTS, Sampling(n=4, temperature=temperature, max_new_tokens=24), "@3")
    assert len(samples) == 16
    assert [s.uid for s in samples] == [uid for uid in "abcd" for _ in range(4)]
    assert samples[0].group == "a@3" and samples[0].payload == {"k": 1, "answer": "x"}
    assert len({tuple(s.response_ids) for s in samples}) == 16  # n samples, not n copies
    for sample in samples:
        sample.check()
        assert sample.weight_version == 0 and sample.loss_mask == [1] * len(sample.response_ids)
        assert 1 <= len(sample.response_ids) <= 24
        assert (sample.stop_reason == "length") == (len(sample.response_ids) == 24 and sample.response_ids[-1] != 2)
    assert worst(samples, folder, reference, temperature) <= 1e-5


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9, "min_p": 0.01}])
def test_a_response_depends_on_its_seed_and_not_on_its_company(engine, cut):
    sampling = Sampling(n=3, max_new_tokens=24, **cut)
    together = {(s.group, i % 3): s.response_ids for i, s in enumerate(engine.generate(PROMPTS, sampling, "@9"))}
    for prompt in reversed(PROMPTS):
        for at, sample in enumerate(engine.generate([prompt], sampling, "@9")):
            assert sample.response_ids == together[sample.group, at]
    other = engine.generate(PROMPTS, sampling, "@10")
    assert not {tuple(s.response_ids) for s in other} & set(map(tuple, together.values()))

    # A response that is taken up again goes on as if it had never been interrupted.
    (group,) = begin(PROMPTS[:1], 3, "@9")
    whole = together[group.name, 1]
    ask = Ask(10**9, PROMPTS[0].token_ids, whole[:7], 24 - 7, group.seed(1, 3))
    (answer,) = engine.exchange([ask], sampling, wait=60).answers
    assert whole[:7] + answer.token_ids == whole


def test_scores_are_log_probs_of_given_tokens(engine, folder, reference):
    sequences = [[5, 6, 7, 8, 20, 30, 40, 50], [3, 4], list(range(50, 90))]
    for ids, scores in zip(sequences, engine.score(sequences), strict=True):
        assert len(scores) == len(ids) - 1
        assert (torch.tensor(scores) - reference(folder, ids[:1], ids[1:])).abs().max() <= 1e-5
    assert engine.score([]) == []


def test_greedy_tokens_are_those_of_transformers(engine, folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for sample in engine.generate(PROMPTS, Sampling(temperature=0.0, max_new_tokens=24)):
        ids = torch.tensor([sample.prompt_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert sample.response_ids == expected[0, ids.shape[1] :].tolist()


def test_stop_tokens_end_a_response_and_belong_to_it(engine, folder):
    own = json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert own in engine.ready()["stop_token_ids"]
    stops = tuple(range(400))
    for sample in engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=30, stop_token_ids=stops)):
        assert sample.stop_reason == "stop"
        assert sample.response_ids[-1] in stops
        assert not set(sample.response_ids[:-1]) & set(stops)


def test_the_same_problem_twice_makes_two_groups(engine):
    samples = engine.generate([PROMPTS[0], PROMPTS[1], PROMPTS[0]], Sampling(n=2, max_new_tokens=2), "@1")
    assert [s.group for s in samples] == ["a@1", "a@1", "b@1", "b@1", "a@1#2", "a@1#2"]
    assert engine.generate([], Sampling()) == []


def test_never_beyond_the_context(engine):
    room, longest = (engine.ready()[key] for key in ("context_length", "longest_prompt"))
    long = Prompt("long", [7] * longest)
    (sample,) = engine.generate([long], Sampling(max_new_tokens=50, temperature=1.0))
    assert len(long.token_ids) + len(sample.response_ids) <= room and sample.response_ids
    for bad in ([], [7] * (longest + 1), [7] * (room + 3)):
        with pytest.raises(UserError, match=f"has {len(bad)} tokens"):
            engine.generate([Prompt("bad", bad)], Sampling())


def test_update_changes_the_weights_and_proves_it(restored, other_folder, reference, shared):
    engine, tensors = restored, tensors_of(other_folder)
    engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=8))  # so that keys and values of the old weights are cached
    prints = update(engine, tensors, shared, 7)
    assert prints == {name: fingerprint(tensor) for name, tensor in tensors.items()}
    assert engine.ready()["weight_version"] == 7
    samples = engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=24))
    assert {s.weight_version for s in samples} == {7}
    assert worst(samples, other_folder, reference) <= 1e-5


def test_fingerprints_only_where_asked(restored, folder, shared):
    assert update(restored, tensors_of(folder), shared, 0, verify=False) == {}


def faulty(tensors, fault):
    square = "model.layers.0.self_attn.k_proj.weight"
    if fault == "dropped":
        return {name: tensor for name, tensor in tensors.items() if name != square}
    if fault == "unknown name":
        return {**tensors, "model.layers.0.self_attn.nope.weight": torch.zeros(3)}
    if fault == "wrong shape":
        return {**tensors, square: tensors[square].t().contiguous()}
    if fault == "wrong dtype":
        return {**tensors, square: tensors[square].bfloat16()}
    raise AssertionError(fault)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("dropped", "brought no model.layers.0.self_attn.k_proj.weight"),
        ("unknown name", "no tensor model.layers.0.self_attn.nope.weight"),
        ("wrong shape", r"model.layers.0.self_attn.k_proj.weight came as \("),
        ("wrong dtype", "model.layers.0.self_attn.k_proj.weight came as bfloat16"),
    ],
)
def test_a_faulty_update_is_refused_and_nothing_is_sampled_after_it(restored, folder, shared, fault, says):
    with pytest.raises(RunError, match=says):
        update(restored, faulty(tensors_of(folder), fault), shared, 2)
    with pytest.raises(RunError, match="not to be trusted"):
        restored.generate(PROMPTS, Sampling(max_new_tokens=2))
    update(restored, tensors_of(folder), shared, 3)
    assert restored.generate(PROMPTS[:1], Sampling(max_new_tokens=2))[0].weight_version == 3


@pytest.mark.parametrize("fault", ["swapped", "transposed", "stale"])
def test_faults_that_fit_show_in_the_fingerprints(restored, folder, other_folder, shared, fault):
    right = tensors_of(folder)
    one, two = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    wrong = {
        "swapped": {one: right[two], two: right[one]},
        "transposed": {one: right[one].t().contiguous().view(right[one].shape)},
        "stale": {one: tensors_of(other_folder)[one]},
    }[fault]
    prints = update(restored, {**right, **wrong}, shared, 2)
    assert {name for name, value in prints.items() if value != fingerprint(right[name])} == set(wrong)


def test_weights_written_in_place_are_what_it_samples_from_and_proved(
    restored, folder, other_folder, shared, reference
):
    written = fill(restored, expose(restored, tensors_of(folder), shared), tensors_of(other_folder))
    assert written == {name: fingerprint(tensor) for name, tensor in tensors_of(other_folder).items()}
    samples = restored.generate(PROMPTS, Sampling(n=2, max_new_tokens=8))
    assert worst(samples, other_folder, reference) <= 1e-5
    assert {s.weight_version for s in samples} == {2}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why it cannot where there is no CUDA")
def test_buckets_that_no_rank_can_open_are_told_and_the_update_goes_on(restored, folder, other_folder, shared):
    restored.begin_update(1)
    (why,) = restored.reach("cuda", [str(shared / "bucket")])
    assert "CUDA" in why or "NVIDIA" in why
    for spec in buckets(tensors_of(other_folder), shared):
        restored.load_buckets([spec])
    assert restored.end_update() == {name: fingerprint(tensor) for name, tensor in tensors_of(other_folder).items()}


def test_what_was_not_exposed_is_not_proved(restored, folder, shared):
    expose(restored, tensors_of(folder), shared)
    restored.begin_update(3)
    with pytest.raises(RunError, match="nothing.weight was not exposed"):
        restored.end_update(["nothing.weight"])


def test_updates_outside_of_a_bracket_are_refused(restored, folder, shared):
    engine, spec = restored, next(iter(buckets(tensors_of(folder), shared)))
    with pytest.raises(RunError, match="no weight update was begun"):
        engine.load_buckets([spec])
    with pytest.raises(RunError, match="no weight update was begun"):
        engine.end_update()
    engine.begin_update(1)
    with pytest.raises(RunError, match="already open"):
        engine.begin_update(1)
    with pytest.raises(RunError, match="has not ended"):
        engine.generate(PROMPTS, Sampling(max_new_tokens=2))
    shape = tuple(tensors_of(folder)["model.norm.weight"].shape)
    missing = BucketSpec.plan(str(shared / "missing"), [("model.norm.weight", torch.float32, shape)])
    with pytest.raises(RunError, match="No such file"):
        engine.load_buckets([missing])
