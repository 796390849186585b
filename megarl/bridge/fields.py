"""Fields of config.json that must be numbers."""

from __future__ import annotations

from megarl.bridge.family import Config
from megarl.errors import UserError


def whole(config: Config, field: str, least: int) -> int:
    """A field that is a whole number."""
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"config.json: {field} = {value!r} must be a whole number of at least {least}.")
    return value


def number(config: Config, field: str, default: float | None) -> float | None:
    """A field that is a number above 0, or null."""
    value = config.get(field, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300):
        raise UserError(f"config.json: {field} = {value!r} must be a number above 0.")
    return value
