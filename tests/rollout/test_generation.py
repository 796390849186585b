"""How responses are cut and cut short: minimum probability, stop texts, what is taken up again."""

import itertools

import pytest
import torch
from transformers import AutoTokenizer

from megarl.batch.sample import Prompt
from megarl.errors import RunError
from megarl.rollout.sampling import Ask, Sampling

PROMPTS = [Prompt("a", [5, 6, 7, 8]), Prompt("b", [10] * 20), Prompt("c", list(range(100, 140)))]


@pytest.mark.parametrize("cut", [{"min_p": 0.6}, {"top_k": 3}, {"top_p": 0.2}])
def test_unlikely_tokens_are_left_out_and_log_probs_are_still_those_of_the_whole_softmax(engine, folder, cut):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for sample in engine.generate(PROMPTS, Sampling(n=2, temperature=0.8, max_new_tokens=16, **cut)):
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].float()
        every = torch.log_softmax(logits / 0.8, -1)
        got = every.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        assert (torch.tensor(sample.rollout_log_probs) - got).abs().max() <= 1e-5
        above = (every > got[:, None] + 1e-6).sum(-1)  # likelier tokens
        if "top_k" in cut:
            assert above.max() < 3
        elif "min_p" in cut:
            assert (got >= every.max(-1).values + torch.tensor(0.6).log() - 1e-5).all()
        else:
            likelier = torch.where(every > got[:, None] + 1e-6, every.exp(), 0.0).sum(-1)
            assert likelier.max() <= 0.2 + 1e-5


def test_a_stop_text_ends_a_response_with_the_token_that_completes_it(engine, folder, reference):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    free = engine.generate(PROMPTS, Sampling(temperature=0.0, max_new_tokens=40))
    pieces = {i: tokenizer.decode(s.response_ids[10:12], skip_special_tokens=False) for i, s in enumerate(free)}
    stops = tuple(text for text in pieces.values() if text and "\ufffd" not in text)
    assert stops
    for sample, whole in zip(
        engine.generate(PROMPTS, Sampling(temperature=0.0, max_new_tokens=40, stop=stops)), free, strict=True
    ):
        sample.check()
        length = len(sample.response_ids)
        assert sample.response_ids == whole.response_ids[:length]  # the same greedy answer, cut

        def holds(ids):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            return any(stop in text for stop in stops)

        first = next((n for n in range(1, 41) if holds(whole.response_ids[:n])), None)
        if first is None:
            assert length == len(whole.response_ids)
        else:
            assert length == first and sample.stop_reason == "stop"
        exact = reference(folder, sample.prompt_ids, sample.response_ids)
        assert (torch.tensor(sample.rollout_log_probs) - exact).abs().max() <= 1e-5


def test_a_hundred_greedy_answers_are_those_of_transformers(engine, folder):
    """Each token is the likeliest one after those before it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    prompts = [Prompt(str(i), torch.randint(3, 380, (1 + i % 50,), generator=generator).tolist()) for i in range(100)]
    ends = engine.ready()["stop_token_ids"]
    samples = engine.generate(prompts, Sampling(temperature=0.0, max_new_tokens=24))
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0]
        assert sample.response_ids == logits[len(sample.prompt_ids) - 1 : -1].argmax(-1).tolist()
        ended = sample.response_ids[-1] in ends
        assert sample.stop_reason == ("stop" if ended else "length") and (ended or len(sample.response_ids) == 24)


def test_stopped_and_taken_up_again_is_the_same_greedy_answer(engine):
    greedy = Sampling(temperature=0.0, max_new_tokens=300)
    whole = engine.generate(PROMPTS, greedy)
    keys = itertools.count(10**6)
    pieces = [Ask(next(keys), prompt.token_ids, [], 300) for prompt in PROMPTS]
    open_asks = {ask.key: (i, ask) for i, ask in enumerate(pieces)}
    done, got, stops = {}, [[] for _ in PROMPTS], 0
    asks, stop = pieces, False
    while open_asks:
        progress = engine.exchange(asks, greedy, 0.05, stop=stop)
        asks = []
        for answer in progress.answers:
            i, ask = open_asks.pop(answer.key)
            got[i] += answer.token_ids
            if answer.stop_reason == "abort":
                again = Ask(next(keys), ask.prompt_ids, list(got[i]), 300 - len(got[i]))
                asks.append(again)
                open_asks[again.key] = (i, again)
                stops += 1
            else:
                done[i] = answer.stop_reason
        stop = bool(open_asks) and not asks and stops < 6
    assert stops >= 3
    assert got == [sample.response_ids for sample in whole]
    assert [done[i] for i in range(3)] == [sample.stop_reason for sample in whole]


def test_no_weights_while_something_is_sampled(engine):
    ask = Ask(2 * 10**6, [5, 6, 7], [], 300)
    sampling = Sampling(stop_token_ids=(), max_new_tokens=300)
    answers = engine.exchange([ask], sampling, 0.0).answers
    if not answers:
        with pytest.raises(RunError, match="1 responses are still being sampled"):
            engine.begin_update(1)
    while not answers:
        answers = engine.exchange([], sampling, 1.0, stop=True).answers
    assert answers[0].key == ask.key
