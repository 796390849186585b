"""The table of what counts as the last number of a text, and the other rules."""

import threading
from decimal import Decimal
from importlib.util import find_spec

import pytest

from megarl.config.schema import RewardConfig
from megarl.rewards import REWARDS, check_reward
from megarl.rewards.rules import find_last_number

LAST_NUMBER = [
    ("7", "7"),
    ("The answer is 12.", "12"),  # a period that ends the sentence
    ("x=7", "7"),
    ("x7", "7"),
    ("7th", "7"),
    ("3 + 4 = 7, I think", "7"),
    ("first 5 then 8", "8"),
    ("**42**", "42"),
    (r"\boxed{42}", "42"),
    ("$5", "5"),
    ("50%", "50"),
    # signs: part of the number where attached to it and nothing stands before it that it could be subtracted from
    ("-3", "-3"),
    ("+3", "3"),
    ("\u22123", "-3"),  # the typographic minus
    ("= -3", "-3"),
    ("=-3", "-3"),
    ("it is -3.", "-3"),
    ("(-3)", "-3"),
    ("$-3$", "-3"),
    ("**-3**", "-3"),
    ("- 3", "3"),  # a list's dash
    ("3-5", "5"),  # a subtraction or a range
    ("3 - 5", "5"),
    ("3 -5", "-5"),
    ("x-5", "5"),
    ("(2)-5", "5"),
    ("2--5", "-5"),  # minus minus five
    # decimals
    ("5.0", "5.0"),
    ("5.25", "5.25"),
    ("-0.5", "-0.5"),
    (".5", "0.5"),
    ("-.5", "-0.5"),
    ("5. Next", "5"),
    ("pi is 3.14.", "3.14"),
    ("v1.2.3", "3"),
    ("12...", "12"),
    # thousands and lists
    ("1,234", "1234"),
    ("1,234,567.5", "1234567.5"),
    ("-1,234", "-1234"),
    ("1,234.", "1234"),
    ("1,234,", "1234"),
    ("1,23", "23"),
    ("1,2,3", "3"),
    ("-1,2", "2"),
    ("1234,567", "567"),
    ("0,123", "123"),
    ("1, 234", "234"),
    # exponents
    ("1e5", "100000"),
    ("2.5E-3", "0.0025"),
    ("1e", "1"),
    ("3e4x", "4"),  # no exponent, so a later number
    ("1/2", "2"),
    ("", None),
    ("no number", None),
    ("-", None),
    ("\u0663", None),  # digits of other scripts are no numbers here
]


@pytest.mark.parametrize(("text", "number"), LAST_NUMBER)
def test_the_last_number_of_a_text(text, number):
    assert find_last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("5.0", "5", 1.0),
        ("5", "5.00", 1.0),
        ("5", 5, 1.0),
        ("0.1", 0.1, 1.0),
        ("1,234", 1234, 1.0),
        ("72", "... so 48+24 = 72\n#### 72", 1.0),
        ("-0", "0", 1.0),
        ("51", "5", 0.0),
        ("5.01", "5", 0.0),
        ("-5", "5", 0.0),
        ("5 or 6", "5", 0.0),
        ("", "5", 0.0),
        ("12345678901234567891", "12345678901234567890", 0.0),  # no rounding to a float on the way
    ],
)
def test_last_number_compares_exactly(text, answer, score):
    assert REWARDS["last_number"](text, answer, {}) == score


@pytest.mark.parametrize(
    "text", ["1,234," * 50_000 + "5", "-" * 300_000, "." * 300_000, "1" * 300_000 + "x", "1e" * 100_000]
)
@pytest.mark.timeout(60)  # quadratic time would take hours
def test_no_text_takes_long(text):
    assert find_last_number(text) is None or find_last_number(text) >= 0


@pytest.mark.parametrize(("text", "share"), [("", 0.0), ("a1b2", 0.5), ("123", 1.0), ("x", 0.0), ("\u0663", 0.0)])
def test_digit_share(text, share):
    assert REWARDS["digit_share"](text, "5", {}) == share


@pytest.mark.parametrize(
    ("text", "answer", "options", "score"),
    [
        ("yes", "yes", {}, 1.0),
        ("  two\n words\t", "two words", {}, 1.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"ignore_case": True}, 1.0),
        ("yes.", "yes", {}, 0.0),
        ("twowords", "two words", {}, 0.0),
        ("5", 5, {}, 1.0),
    ],
)
def test_exact_match(text, answer, options, score):
    assert REWARDS["exact_match"](text, answer, {}, **options) == score


MATHEMATICS = [
    ("so $\\frac{1}{2}$", "0.5", 1.0),
    ("$x+1$", "1+x", 1.0),
    ("\\boxed{\\sqrt{4}}", "$2$", 1.0),
    ("$3$", "4", 0.0),
]


def test_math_verify_is_there_or_asked_for():
    """Where the package is missing, checking the configuration says so; where it is there, it compares, in any thread."""
    faults = check_reward(RewardConfig("math_verify"))
    if find_spec("math_verify") is None:
        assert faults == ["reward 'math_verify' needs the package: pip install 'math-verify[antlr4-9-3]'"]
        return
    assert faults == []
    scores: list[list[float]] = []

    def work() -> None:
        scores.append([REWARDS["math_verify"](text, answer, {}) for text, answer, _ in MATHEMATICS])

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert scores == [[score for _, _, score in MATHEMATICS]] * 2
