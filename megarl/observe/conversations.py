"""What the model said: records for samples.jsonl, and panels for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

if TYPE_CHECKING:
    from megarl.batch import Batch

SHOWN_CHARACTERS = 700  # of one text; the whole of it is in samples.jsonl
SHOWN_LINES = 10


def records(batch: Batch, step: int) -> list[dict[str, Any]]:
    """One plain object a sample of a scored batch: step, uid, prompt, response, reward, answer, stop_reason, tokens."""
    found = []
    lengths = batch.response_lengths.tolist()
    for at in range(len(batch)):
        payload = batch["payload"][at]
        found.append(
            {
                "step": step,
                "uid": batch["uid"][at],
                "prompt": payload.get("prompt", ""),
                "response": batch["response_text"][at],
                "reward": float(batch["reward"][at]),
                "answer": payload.get("answer"),
                "stop_reason": batch["stop_reason"][at],
                "tokens": lengths[at],
            }
        )
    return found


def choose(samples: Sequence[Mapping[str, Any]], count: int = 3) -> list[Mapping[str, Any]]:
    """A few that show the most: the best and the worst reward first, no prompt twice while there are others."""
    by_reward = sorted(samples, key=lambda sample: sample["reward"])
    queue = [by_reward[-1], by_reward[0], *samples] if by_reward else []
    chosen: list[Mapping[str, Any]] = []
    for fresh_prompts_only in (True, False):
        for sample in queue:
            if len(chosen) == count:
                break
            if any(sample is other for other in chosen):
                continue
            if not fresh_prompts_only or all(sample["uid"] != other["uid"] for other in chosen):
                chosen.append(sample)
    return chosen


def panel(sample: Mapping[str, Any]) -> RenderableType:
    """One conversation in a box: the prompt, the response, and above them what came of it."""
    reward = float(sample["reward"])
    colour = "green" if reward >= 1.0 else "red" if reward <= 0.0 else "yellow"
    verdict = f"reward {reward:g}" + (
        "" if sample.get("answer") is None else f" · answer {shorten(str(sample['answer']), 40)}"
    )
    length = f"{sample['tokens']} tokens, {'cut off' if sample['stop_reason'] == 'length' else sample['stop_reason']}"
    body = Group(
        Text(shorten(sample["prompt"]), style="dim"),
        Text.assemble(("▸ ", colour), shorten(sample["response"]) or Text("(nothing)", style="dim italic")),
    )
    title = Text.assemble((f" step {sample['step']} · {sample['uid']} ", "bold"))
    return Panel(body, title=title, title_align="left", subtitle=Text(f" {verdict} · {length} ", style=colour),
                 subtitle_align="right", border_style=colour, padding=(0, 1))  # fmt: skip


def shorten(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    """A text fit for a terminal: not too long, its middle left out, control characters made visible."""
    text = text.strip()
    if len(text) > characters:
        text = text[: characters * 2 // 3].rstrip() + " […] " + text[-characters // 3 :].lstrip()
    lines = text.splitlines()
    if len(lines) > SHOWN_LINES:
        lines = [*lines[: SHOWN_LINES - 3], "[…]", *lines[-2:]]
    # A model may well write an escape sequence, and the terminal would obey it.
    return "\n".join(
        "".join(sign if sign.isprintable() or sign == "\t" else "\N{REPLACEMENT CHARACTER}" for sign in line)
        for line in lines
    )
