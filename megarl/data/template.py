"""From a problem to the token ids that the model reads: the system message, the suffix, the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.data.problem import Problem
from megarl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptTemplate:
    """Encodes problems for one tokenizer.

    With a chat template: system message (a conversation's own goes before the configured one), turns, generation prompt.
    Without one (a base model): the text as it is, the system message and an empty line before it, and whatever special
    tokens the tokenizer puts around plain text; conversations are refused, for nobody can say how to write them down.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None, suffix: str = ""):
        self.tokenizer = tokenizer
        self.system = system
        self.suffix = suffix
        self.chat = bool(getattr(tokenizer, "chat_template", None))

    def text(self, problem: Problem) -> str:
        """What the user's turn says, the suffix included."""
        return problem.user_text + self.suffix

    def render(self, problem: Problem) -> str:
        """The whole prompt as text, control tokens included. UserError names the problem that cannot be written down."""
        if not self.chat:
            if not isinstance(problem.prompt, str):
                raise UserError(
                    f"{problem.where}: the prompt is a list of messages, but the model's tokenizer has no chat template: "
                    "use a chat model, or give prompts as plain text"
                )
            return (f"{self.system}\n\n" if self.system else "") + self.text(problem)
        turns = (
            [{"role": "user", "content": problem.prompt}] if isinstance(problem.prompt, str) else list(problem.prompt)
        )
        turns[-1] = turns[-1] | {"content": self.text(problem)}
        if self.system is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.system})
        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # jinja's own errors: a template may refuse a role or an order of turns
            raise UserError(f"{problem.where}: the model's chat template refuses this prompt: {error}") from error

    def encode(self, problems: Sequence[Problem]) -> list[list[int]]:
        """Token ids, one list a problem."""
        if not problems:
            return []
        texts = [self.render(problem) for problem in problems]
        # A chat template writes its own special tokens; adding the tokenizer's would double the first one.
        return list(self.tokenizer(texts, add_special_tokens=not self.chat)["input_ids"])
