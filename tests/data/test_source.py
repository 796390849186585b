"""Prompt sources: what comes out, in which order, and what is said about bad data."""

import json
import pickle
from collections import Counter
from pathlib import Path

import pytest

from megarl.config.schema import DataConfig, SourceConfig
from megarl.data import build, check_data, check_source
from megarl.errors import ConfigError, UserError

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def chain_sum(size=None, seed=0, **arguments) -> SourceConfig:
    return SourceConfig(kind="reasoning_gym", task="chain_sum", task_args=ONE_DIGIT | arguments, size=size, seed=seed)


def lines(path: Path, rows, **settings) -> SourceConfig:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n")
    return SourceConfig(kind="jsonl", path=str(path), **settings)


def numbered(path: Path, count: int) -> SourceConfig:
    return lines(
        path, [{"prompt": f"say {number}", "answer": str(number), "level": number % 3} for number in range(count)]
    )


def table(path: Path, columns, **settings) -> SourceConfig:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return SourceConfig(kind="parquet", path=str(path), **settings)


# ---- what a prompt is


def test_a_prompt_is_the_chat_template_around_system_turn_and_suffix(tmp_path, tokenizer):
    config = DataConfig(train=numbered(tmp_path / "a.jsonl", 3), system="Be short.", suffix=" Go.", shuffle=False)
    prompt = build(config, tokenizer, seed=1).train.take(2)[1]
    assert tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nsay 1 Go.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (prompt.uid, prompt.text, prompt.answer) == ("train-2", "say 1 Go.", "1")  # the file's second line
    assert prompt.payload == {"level": 1, "prompt": "say 1 Go.", "answer": "1"}


def test_conversations_keep_their_turns_and_their_own_system_message(tmp_path, tokenizer):
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3?"},
    ]
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "4+4?"}]
    rows = [{"prompt": turns, "answer": "6"}, {"prompt": own, "answer": "8"}]
    config = DataConfig(train=lines(tmp_path / "a.jsonl", rows), system="Yours.", suffix="!", shuffle=False)
    first, second = build(config, tokenizer, seed=1).train.take(2)
    assert tokenizer.decode(first.token_ids) == (
        "<|im_start|>system\nYours.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3?!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert first.text == "3+3?!"
    assert tokenizer.decode(second.token_ids).startswith("<|im_start|>system\nMine.<|im_end|>\n<|im_start|>user\n4+4?!")


def test_parquet_gives_the_same_prompts_as_json_lines(tmp_path, tokenizer):
    turns = [[{"role": "user", "content": f"say {number}"}] for number in range(5000)]  # more than one batch of rows
    answers = [str(number) for number in range(5000)]
    parquet = table(tmp_path / "a.parquet", {"prompt": turns, "answer": answers, "level": [7] * 5000})
    rows = [{"prompt": turn, "answer": answer, "level": 7} for turn, answer in zip(turns, answers, strict=True)]
    jsonl = lines(tmp_path / "a.jsonl", rows)
    one, other = (build(DataConfig(train=train), tokenizer, seed=4).train.take(300) for train in (parquet, jsonl))
    assert one == other


def test_a_base_model_reads_plain_text_and_refuses_conversations(tmp_path, base_tokenizer):
    config = DataConfig(train=numbered(tmp_path / "a.jsonl", 2), system="Be short.", shuffle=False)
    made = build(config, base_tokenizer, seed=1)
    assert base_tokenizer.decode(made.train.take(1)[0].token_ids) == "Be short.\n\nsay 0"
    assert made.notes == ["the tokenizer has no chat template: prompts are plain text"]
    config.train = lines(tmp_path / "b.jsonl", [{"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}])
    with pytest.raises(UserError, match=r"b\.jsonl:1: the prompt is a list of messages.*no chat template"):
        build(config, base_tokenizer, seed=1)


def test_a_template_that_refuses_a_prompt_is_one_sentence_with_the_place(tmp_path, tokenizer):
    tokenizer = pickle.loads(pickle.dumps(tokenizer))
    tokenizer.chat_template = "{{ raise_exception('turns must alternate') }}"
    with pytest.raises(
        UserError, match=r"a\.jsonl:1: the model's chat template refuses this prompt: turns must alternate"
    ):
        build(DataConfig(train=numbered(tmp_path / "a.jsonl", 1)), tokenizer, seed=1)


# ---- order


def test_every_epoch_gives_each_problem_once_in_an_order_of_its_own(tmp_path, tokenizer):
    config = DataConfig(train=numbered(tmp_path / "a.jsonl", 13))
    source = build(config, tokenizer, seed=5).train
    epochs = [[prompt.uid for prompt in source.take(13)] for _ in range(4)]
    assert all(Counter(epoch) == Counter(epochs[0]) and len(set(epoch)) == 13 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = build(config, tokenizer, seed=5).train
    # Crossing epochs, one take of several of them included, changes nothing.
    uids = [uid for epoch in epochs for uid in epoch]
    assert [prompt.uid for size in (5, 40, 7) for prompt in again.take(size)] == uids
    assert [prompt.uid for prompt in build(config, tokenizer, seed=6).train.take(13)] != epochs[0]


def test_without_shuffling_the_order_is_the_files(tmp_path, tokenizer):
    source = build(DataConfig(train=numbered(tmp_path / "a.jsonl", 4), shuffle=False), tokenizer, seed=5).train
    assert [prompt.uid for prompt in source.take(6)] == [f"train-{line}" for line in (1, 2, 3, 4, 1, 2)]


def test_evaluation_is_in_the_files_order_and_leaves_the_position_alone(tmp_path, tokenizer):
    config = DataConfig(train=chain_sum(20), eval=numbered(tmp_path / "a.jsonl", 9))
    held_out = build(config, tokenizer, seed=5).eval
    held_out.take(4)
    assert [prompt.uid for prompt in held_out.all()] == [f"eval-{line}" for line in range(1, 10)]
    assert held_out.position == 4


@pytest.mark.parametrize("taken", [0, 1, 12, 13, 14, 31])
def test_a_resumed_source_goes_on_where_the_other_stopped(tmp_path, tokenizer, taken):
    config = DataConfig(train=numbered(tmp_path / "a.jsonl", 13))
    source = build(config, tokenizer, seed=5).train
    source.take(taken)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = build(config, tokenizer, seed=5).train
    resumed.load_state_dict(state)
    assert resumed.take(30) == source.take(30)


def test_resuming_with_other_problems_is_refused(tmp_path, tokenizer):
    state = build(DataConfig(train=numbered(tmp_path / "a.jsonl", 13)), tokenizer, seed=5).train.state_dict()
    for config, seed in (
        (DataConfig(train=numbered(tmp_path / "b.jsonl", 14)), 5),
        (DataConfig(train=numbered(tmp_path / "a.jsonl", 13)), 6),
        (DataConfig(train=numbered(tmp_path / "a.jsonl", 13), shuffle=False), 5),
    ):
        with pytest.raises(UserError, match="cannot resume in the train set"):
            build(config, tokenizer, seed).train.load_state_dict(state)


# ---- held out


def test_the_evaluation_set_of_the_smallest_task_is_held_out(tokenizer):
    """One-digit sums of two terms: 200 problems in all, and two seeds that would overlap almost wholly."""
    made = build(DataConfig(train=chain_sum(2000, seed=0), eval=chain_sum(64, seed=1)), tokenizer, seed=1)
    train, held_out = made.train.all(), made.eval.all()
    assert len(held_out) == len({prompt.text for prompt in held_out}) == 64
    assert len(train) == len({prompt.text for prompt in train}) == 136
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held_out}
    assert made.notes == [
        "train: chain_sum has only 136 different problems outside the evaluation set, of 2000 asked for"
    ]
    assert {"expression", "num_terms"} <= train[0].payload["metadata"].keys()


def test_problems_held_out_leave_a_training_file_too(tmp_path, tokenizer):
    config = DataConfig(train=numbered(tmp_path / "a.jsonl", 10), eval=numbered(tmp_path / "b.jsonl", 4))
    made = build(config, tokenizer, seed=1)
    assert {prompt.text for prompt in made.train.all()} == {f"say {number}" for number in range(4, 10)}
    assert made.notes == [f"train: 4 problems that are held out for evaluation left out of {tmp_path}/a.jsonl"]
    config.eval = config.train
    assert check_data(config) == [
        f"data.train: {tmp_path}/a.jsonl has no problem that is not also in data.eval: make the evaluation set smaller"
    ]


def test_one_seed_gives_one_set_of_problems(tokenizer):
    first, again, other = (
        build(DataConfig(train=chain_sum(30, seed)), tokenizer, 1).train.all() for seed in (3, 3, 99)
    )
    assert first == again != other
    assert len(build(DataConfig(train=chain_sum(size=None, max_digits=4)), tokenizer, 1).train) == 500  # the default


# ---- too long


def test_too_long_prompts_are_dropped_with_a_count_or_named(tmp_path, tokenizer):
    rows = [{"prompt": "no " * words, "answer": "x"} for words in (1, 90, 2, 200)]
    config = DataConfig(train=lines(tmp_path / "a.jsonl", rows), max_prompt_tokens=60)
    made = build(config, tokenizer, seed=1)
    assert sorted(prompt.uid for prompt in made.train.all()) == ["train-1", "train-3"]
    assert made.notes[0].startswith("train: 2 of 4 prompts dropped: longer than 60 tokens (the longest, ")
    assert f"{tmp_path}/a.jsonl:4: " in made.notes[0]
    config.too_long = "error"
    with pytest.raises(
        UserError, match=r"2 of 4 prompts are longer than data.max_prompt_tokens=60: .*a.jsonl:2 \(\d+\), "
    ):
        build(config, tokenizer, seed=1)
    config.too_long, config.max_prompt_tokens = "drop", 3
    with pytest.raises(UserError, match="all 4 prompts are longer than data.max_prompt_tokens=3"):
        build(config, tokenizer, seed=1)


# ---- everything wrong, with its place, at once

GOOD = {"prompt": "hi", "answer": "x"}
BAD_LINES = {
    b'{"prompt": "a", "answer"': "malformed JSON, column",
    b"not json": "malformed JSON, column 1",
    b"[" * 100_000: "malformed JSON",
    b'["a list"]': "not a JSON object",
    b"7": "not a JSON object",
    b'{"prompt": "\\ud800 a", "answer": "x"}': "'\\ud800' is half of a character",
    b'{"prompt": "caf\xe9", "answer": "x"}': "not UTF-8 (byte 16 of the line)",
    b'{"answer": "x"}': "no key 'prompt'; the row has: answer",
    b'{"prompt": "a", "question": "b"}': "no key 'answer'; the row has: prompt, question",
    b'{"prompt": "a", "answer": null}': "no key 'answer'",
    b'{"prompt": "  ", "answer": "x"}': "the prompt (key 'prompt') is empty",
    b'{"prompt": 7, "answer": "x"}': "must be text or a list of {role, content} messages, not int",
    b'{"prompt": [], "answer": "x"}': "is an empty list of messages",
    b'{"prompt": ["a"], "answer": "x"}': "has a message without a role (message 1)",
    b'{"prompt": [{"role": "user"}], "answer": "x"}': "has a message whose content is not text (message 1)",
    b'{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "x"}': (
        "ends with a message of the assistant"
    ),
}


@pytest.mark.parametrize(("bad", "said"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_by_file_and_line(tmp_path, bad, said):
    faults = check_source(lines(tmp_path / "a.jsonl", [GOOD, b"", bad, GOOD]))
    assert len(faults) == 1
    assert faults[0].startswith(f"data.train: {tmp_path}/a.jsonl:3: ") and said in faults[0]
    assert "\n" not in faults[0] and len(faults[0]) < 400


def test_blank_lines_and_a_byte_order_mark_are_no_faults(tmp_path, tokenizer):
    rows = [b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", b"   ", {"prompt": "ho", "answer": 3}]
    config = DataConfig(train=lines(tmp_path / "a.jsonl", rows))
    assert check_data(config) == []
    assert {prompt.uid for prompt in build(config, tokenizer, 1).train.all()} == {"train-1", "train-4"}


def test_all_faults_of_both_sources_come_at_once_and_a_thousand_are_not_listed(tmp_path, tokenizer):
    train = lines(tmp_path / "a.jsonl", [b"{"] * 1000)
    config = DataConfig(
        train=train, eval=SourceConfig(kind="jsonl", path=str(tmp_path / "none.jsonl")), too_long="dropp"
    )
    with pytest.raises(ConfigError) as caught:
        build(config, tokenizer, seed=1)
    said = caught.value.problems
    assert said[0] == "data.too_long is 'dropp'; did you mean 'drop'?"
    assert said[1] == f"data.eval: {tmp_path}/none.jsonl: no such file"
    assert said[2].startswith(f"data.train: {tmp_path}/a.jsonl:1: malformed") and len(said) == 13
    assert said[-1] == "data.train: … and 990 more like these"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (SourceConfig(kind="jsonl"), "data.train: a jsonl source needs `path`"),
        (SourceConfig(kind="csv"), "data.train.kind is 'csv'; known: jsonl, parquet, reasoning_gym"),
        (SourceConfig(kind="json"), "data.train.kind is 'json'; did you mean 'jsonl'?"),
        (SourceConfig(), "data.train: a reasoning_gym source needs `task`, e.g. chain_sum"),
        (
            SourceConfig(task="chain_sums"),
            "data.train: reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'?",
        ),
        (
            chain_sum(terms=3),
            "refuses its arguments: ChainSumConfig.__init__() got an unexpected keyword argument 'terms'",
        ),
        (chain_sum(min_terms=9), "refuses its arguments: max_terms must be >= min_terms"),
        (chain_sum(seed=1, size=0), "data.train.size must be at least 1, not 0"),
        (SourceConfig(task="chain_sum", task_args={"size": 3}), "set `size` beside `task`, not in `task_args`"),
    ],
)
def test_a_wrong_source_is_one_sentence(source, said):
    faults = check_source(source)
    assert len(faults) == 1 and said in faults[0]


def test_empty_and_unreadable_files(tmp_path):
    empty = lines(tmp_path / "empty.jsonl", [])
    assert check_source(empty) == [f"data.train: {tmp_path}/empty.jsonl is empty"]
    assert check_source(SourceConfig(kind="jsonl", path=str(tmp_path))) == [
        f"data.train: {tmp_path}: is a folder, not a jsonl file"
    ]
    torn = SourceConfig(kind="parquet", path=empty.path)
    assert check_source(torn, "data.eval")[0].startswith(
        f"data.eval: {tmp_path}/empty.jsonl: not a readable parquet file: "
    )


def test_a_parquet_file_without_the_columns_or_with_holes(tmp_path):
    source = table(tmp_path / "a.parquet", {"question": ["a", "b"], "answer": ["1", None]})
    assert check_source(source) == [
        f"data.train: {tmp_path}/a.parquet: no column 'prompt'; its columns are: question, answer"
    ]
    source.prompt_key = "question"
    assert check_source(source) == [f"data.train: {tmp_path}/a.parquet:2: no key 'answer'; the row has: question"]
    source.answer_key = ""  # a reward that needs no answer
    assert check_source(source) == []


def test_size_takes_the_first_problems_of_a_file(tmp_path, tokenizer):
    config = DataConfig(train=numbered(tmp_path / "a.jsonl", 9))
    config.train.size = 4
    assert len(build(config, tokenizer, 1).train) == 4
    config.train.size = 40
    made = build(config, tokenizer, 1)
    assert made.notes == [f"train: {tmp_path}/a.jsonl has only 9 problems, of 40 asked for"]
