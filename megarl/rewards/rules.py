"""Rewards that follow from the text and the answer alone."""

from __future__ import annotations

import re
import threading
from decimal import Decimal
from typing import Any

from megarl.rewards.registry import reward

# A sign counts only where it is attached to its number and nothing stands before it that it could be subtracted from.
# Digits and commas are matched as one block and split afterwards, so that no text takes quadratic time.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.%])[-+\u2212])?"
    r"(?:(?P<whole>[0-9]+(?:,[0-9]+)*)(?P<fraction>\.[0-9]+)?|(?<![\w.])(?P<bare>\.[0-9]+))"
    r"(?P<exponent>[eE][-+]?[0-9]{1,4}(?![\w.]))?"
)


def find_last_number(text: str) -> Decimal | None:
    """The last number in a text, None if there is none.

    1,234 is one number where the commas stand at thousands, else a list whose last member counts. A period after digits
    belongs to the number only if digits follow. 3-5 ends with 5: the sign there is an operator.
    """
    last = None
    for found in _NUMBER.finditer(text):
        last = found
    if last is None:
        return None
    sign, fraction, exponent = last["sign"] or "", last["fraction"] or last["bare"] or "", last["exponent"] or ""
    pieces = (last["whole"] or "0").split(",")
    grouped = len(pieces[0]) <= 3 and pieces[0][0] != "0" and all(len(piece) == 3 for piece in pieces[1:])
    if len(pieces) > 1 and not grouped:
        pieces, sign = pieces[-1:], ""  # a list: the sign belonged to its first member
    return Decimal(("-" if sign in ("-", "\u2212") else "") + "".join(pieces) + fraction + exponent)


def answer_number(answer: Any) -> Decimal:
    """An answer as a number: itself, or the last number of its text ("#### 72" is 72). ValueError if it has none."""
    number = None if isinstance(answer, bool) else find_last_number(str(answer))
    if number is None:
        raise ValueError(f"the answer {answer!r} holds no number")
    return number


def _text_of(answer: Any) -> None:
    if answer is None:
        raise ValueError("there is no answer to compare with")


@reward("last_number", check_answer=answer_number)
def last_number(text: str, answer: Any, payload: dict[str, Any]) -> float:
    """1.0 if the last number in the text equals the answer, exactly (5.0 equals 5)."""
    return float(find_last_number(text) == answer_number(answer))


@reward("exact_match", check_answer=_text_of)
def exact_match(text: str, answer: Any, payload: dict[str, Any], *, ignore_case: bool = False) -> float:
    """1.0 if the whole text is the answer, whatever white space stands around and between its words."""
    said, expected = " ".join(text.split()), " ".join(str(answer).split())
    return float(said.casefold() == expected.casefold() if ignore_case else said == expected)


@reward("digit_share")
def digit_share(text: str, answer: Any, payload: dict[str, Any]) -> float:
    """The share of characters that are digits; 0.0 of no text. A toy: even a random model earns a little of it, and can learn."""
    return sum("0" <= character <= "9" for character in text) / max(len(text), 1)


@reward("math_verify", check_answer=_text_of)
def math_verify(text: str, answer: Any, payload: dict[str, Any], *, timeout: int = 5) -> float:
    """1.0 if math-verify finds text and answer equal as mathematics (LaTeX or plain; the answer may be in $…$ or bare).

    `timeout`, in seconds, guards each parse and comparison; it rests on a signal and so works in the main thread only.
    """
    from math_verify import parse, verify

    limit = timeout if threading.current_thread() is threading.main_thread() else None
    expected = str(answer)
    gold = parse(expected if "$" in expected or "\\boxed" in expected else f"${expected}$", parsing_timeout=limit)
    return float(verify(gold, parse(text, parsing_timeout=limit), timeout_seconds=limit))
