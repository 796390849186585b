"""Engines that run already, named by URL: real SGLang servers, which a run neither starts nor stops."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megarl import config
from megarl.batch.sample import Prompt
from megarl.bridge.model_map import ModelMap
from megarl.controller import server_checks
from megarl.models.tiny import make_tiny
from megarl.reshard.disk import Disk
from megarl.rollout.engine import AnyEngine, Engine, EngineLost
from megarl.rollout.remote import RemoteEngine
from megarl.rollout.sampling import Sampling
from tests.controller.runs import CONFIG, LEARNABLE, Run
from tests.controller.servers import Server, between, free_port
from tests.reshard.whole import Whole

PROMPTS = [Prompt("a", [5, 6, 7, 8]), Prompt("b", [10] * 20), Prompt("c", list(range(100, 140)))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(model, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


def faults(model: Path, *urls: str, overrides: tuple[str, ...] = ()) -> list[str]:
    named = [f"rollout.urls={json.dumps(urls)}", "reshard.transport=disk", "rollout.max_total_tokens=null"]
    cfg = config.load(CONFIG, [f"model.path={model}", *named, *overrides])
    return list(server_checks.problems(cfg, ModelMap.from_hf(model)))


def test_what_does_not_answer_as_a_server_does_is_named(model: Path) -> None:
    (told,) = faults(model, url := f"http://127.0.0.1:{free_port()}")
    assert url in told and "does not answer ([Errno 111] Connection refused); start it, or name another" in told
    for spoil, said in {
        "nothing": (lambda path, status, answer: (200, b""), "does not answer as an SGLang server does"),
        "a page": (lambda path, status, answer: (200, b"<html>"), "answered /health with what is not JSON: <html>"),
        "an error": (lambda path, status, answer: (500, b"oh no"), "answered /health with HTTP 500: oh no"),
        "a list": (lambda path, status, answer: (200, b"[]"), "does not answer as an SGLang server does"),
    }.values():
        with between(None, spoil) as url:
            (told,) = faults(model, url)
            assert told.startswith(f"rollout.urls: the SGLang server at {url} ") and said in told and "\n" not in told


@pytest.mark.slow
def test_a_server_of_another_model_is_refused_before_anything_starts(
    server: Server, model: Path, tmp_path: Path
) -> None:
    assert faults(model, server.url) == []
    (told,) = faults(make_tiny("llama", tmp_path / "llama"), server.url)
    assert "serves a model of type qwen3" in told and "is one of type llama" in told
    wide = make_tiny("qwen3", tmp_path / "wide")
    settings = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(settings | {"vocab_size": settings["vocab_size"] + 2}))
    (told,) = faults(wide, server.url)
    assert "model.embed_tokens.weight as (419," in told and "has it as (421," in told
    (told,) = faults(model, server.url, overrides=("rollout.dtype=bfloat16",))
    assert "computes in float32, and this run samples in bfloat16" in told
    (told,) = faults(model, server.url, overrides=("rollout.max_new_tokens=500",))
    assert "has room for 512 tokens" in told
    with Run(tmp_path / "run", "model.path=tiny-llama", *NAMED, f"rollout.urls=[{server.url}]") as run:
        assert run.finish(60) == 2
        assert "serves a model of type qwen3" in run.err and not run.root.exists()


NAMED = ("reshard.transport=disk", "rollout.max_total_tokens=null", "model.dtype=float32", "cluster.worker_timeout=120")


@pytest.mark.slow
def test_another_vocabulary_is_seen_where_the_server_s_folder_is_not(
    server: Server, model: Path, tmp_path: Path
) -> None:
    def elsewhere(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
        return status, answer.replace(str(model).encode(), b"/elsewhere") if path == "/model_info" else answer

    with between(server.url, elsewhere) as url:
        assert faults(model, url) == []
        for tokens, said in ((418, "knows more tokens than the 418"), (420, "knows fewer tokens than the 420")):
            other = make_tiny("qwen3", tmp_path / str(tokens))
            settings = json.loads((other / "config.json").read_text())
            (other / "config.json").write_text(json.dumps(settings | {"vocab_size": tokens}))
            (told,) = faults(other, url)
            assert said in told


@pytest.mark.slow
def test_answers_and_weights_are_those_of_an_engine_of_ones_own(server: Server, model: Path, tmp_path: Path) -> None:
    """Seeds, stop texts, log-probs, weights by way of a folder, and the next version of them."""
    other = make_tiny("qwen3", tmp_path / "other", seed=1)
    tensors = load_file(other / "model.safetensors")
    remote, own = RemoteEngine(server.url, str(model), seed=3), Engine(str(model), dtype="float32", seed=3)
    plain, stopped = Sampling(n=4, max_new_tokens=40, top_p=0.9), Sampling(n=4, max_new_tokens=40, stop=("a", "b"))
    try:
        for version, folder in enumerate((model, other), 1):
            moving = Disk(
                ModelMap.from_hf(model),
                dtype="float32",
                bucket_bytes=100_000,
                verify="full",
                folder=tmp_path / "weights",
                source=model,
            )
            receivers = [Receiver(engine) for engine in (remote, own)]
            for receiver in receivers:
                assert moving.push(Whole(folder), receiver, version).verified == len(tensors)
            assert receivers[0].prints == receivers[1].prints
            for sampling in (plain, stopped):
                theirs, ours = (engine.generate(PROMPTS, sampling) for engine in (remote, own))
                assert sampling is plain or all(sample.stop_reason == "stop" for sample in theirs)
                for one, two in zip(theirs, ours, strict=True):
                    assert (one.response_ids, one.stop_reason) == (two.response_ids, two.stop_reason)
                    assert one.rollout_log_probs == pytest.approx(two.rollout_log_probs, abs=1e-5)
                    assert one.weight_version == version
            ids = list(range(5, 60))
            assert remote.score([ids])[0] == pytest.approx(own.score([ids])[0], abs=1e-5)
    finally:
        remote.shutdown()
        own.shutdown()


class Receiver:
    """One engine as the side that weights are given to."""

    def __init__(self, engine: AnyEngine):
        self.engine = engine
        self.begin_update, self.load = engine.begin_update, engine.load_buckets
        self.prints: dict[str, int] = {}

    def loaded(self, token: object) -> None:
        pass

    def end_update(self) -> list[dict[str, int]]:
        self.prints = self.engine.end_update()
        return [self.prints]


@pytest.mark.slow
def test_what_cannot_be_right_is_one_sentence_that_names_the_server(server: Server, model: Path) -> None:
    def changed(change: Callable[[dict[str, Any]], None]) -> Callable[[str, int, bytes], tuple[int, bytes]]:
        def spoil(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
            if path != "/generate":
                return status, answer
            output = json.loads(answer)
            change(output)
            return status, json.dumps(output).encode()

        return spoil

    cases: dict[str, Callable[[str, int, bytes], tuple[int, bytes]]] = {
        "HTTP 500: oh no": lambda path, status, answer: (500, b"oh no") if path == "/generate" else (status, answer),
        "not JSON: {": lambda path, status, answer: (status, answer[:40] if path == "/generate" else answer),
        "has 7 tokens and 8 log-probs": changed(lambda output: output["output_ids"].pop()),
        "no response: ": changed(lambda output: output["output_ids"].append("x")),
        "has the token 419, and the model has 419": changed(lambda output: output["output_ids"].__setitem__(0, 419)),
        "ended with 'tired'": changed(lambda output: output["meta_info"]["finish_reason"].update(type="tired")),
        "5, and was given default": changed(lambda output: output["meta_info"].update(weight_version="5")),
    }
    for said, spoil in cases.items():
        with between(server.url, spoil) as url:
            engine = RemoteEngine(url, str(model), seed=3)
            engine._server.web.version = "default" if "default" in said else None
            with pytest.raises(EngineLost) as caught:
                engine.generate(PROMPTS[:1], Sampling(max_new_tokens=8, temperature=1.0))
            assert url in str(caught.value) and said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_two_steps_learn_what_they_learn_with_an_engine_of_ones_own(model: Path, tmp_path: Path) -> None:
    same = (*LEARNABLE, f"model.path={model}", "run.steps=2", "rollout.temperature=1.0", "model.dtype=float32")
    told = {}
    with Server(model, tmp_path / "log") as server:
        urls = ("reshard.transport=disk", "rollout.max_total_tokens=null", f"rollout.urls=[{server.url}]")
        for name, overrides in {"own": (), "server": (*urls, "reshard.probe=false")}.items():
            record = tmp_path / f"{name}.jsonl"
            with Run(tmp_path / name, *same, *overrides, f"rollout.record={record}") as run:
                assert run.finish(250) == 0, run.err
                assert run.leftovers() == []
                told[name] = run.steps(), [json.loads(line) for line in record.read_text().split("\n") if line]
                assert all(row["reshard/probe_abs_max"] <= 1e-5 for row in run.steps())
        server.ready()  # it was not stopped, and holds no weights of a folder that is gone
    (own, own_samples), (remote, remote_samples) = told["own"], told["server"]
    for one, two in zip(own_samples, remote_samples, strict=True):
        assert one["sample"]["response_ids"] == two["sample"]["response_ids"]
        assert one["sample"]["rollout_log_probs"] == pytest.approx(two["sample"]["rollout_log_probs"], abs=1e-5)
    for one, two in zip(own, remote, strict=True):
        for key in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy"):
            assert one[key] == pytest.approx(two[key], rel=1e-4, abs=1e-6), key


@pytest.mark.slow
def test_a_server_that_dies_ends_the_run_in_one_sentence(model: Path, tmp_path: Path) -> None:
    with Server(model, tmp_path / "log") as server:
        named = ("reshard.transport=disk", "rollout.max_total_tokens=null", f"rollout.urls=[{server.url}]")
        long = ("run.steps=1000", "data.eval=null", "rollout.max_new_tokens=200", f"model.path={model}")
        with Run(tmp_path / "run", *LEARNABLE, *named, *long) as run:
            run.until(run.steps, 200, "a step")
            server.kill()
            assert run.finish(60) == 1
            (said,) = run.said
            assert (
                f"the SGLang server at {server.url} does not answer (" in said and "Traceback" not in run.err + run.out
            )
            assert run.leftovers() == []
