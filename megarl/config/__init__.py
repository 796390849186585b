"""The settings of a run: `load` reads them, `check` finds what cannot work, `dump` writes them down resolved."""

from megarl.config.checks import check, problems
from megarl.config.loading import dump, load
from megarl.config.schema import Config

__all__ = ["Config", "check", "dump", "load", "problems"]
