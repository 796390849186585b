"""Reward functions as a user would write them, right and wrong."""

import numpy as np


def length(text: str, answer: object, payload: dict, *, scale: float = 1.0) -> float:
    return scale * len(text)


def level(text: str, answer: object, payload: dict) -> float:
    return payload["level"]


def truth(text: str, answer: object, payload: dict) -> bool:
    return np.bool_(text == answer)


def odd_one_out(text: str, answer: object, payload: dict) -> object:
    """Answers what the problem's data tells it to."""
    return payload["give"]


def fails(text: str, answer: object, payload: dict) -> float:
    return {"a": 1.0}[text]


def too_few(text: str) -> float:
    return 0.0


CONSTANT = 3
