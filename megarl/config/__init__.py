"""The settings of a run: `load` reads them, `check` finds what cannot work, `dump` writes them down resolved.

`read` and `problems` are the same two without raising, for whoever wants to list everything at once.
"""

from megarl.config.checks import check, problems
from megarl.config.loading import Reading, dump, load, read
from megarl.config.schema import Config

__all__ = ["Config", "Reading", "check", "dump", "load", "problems", "read"]
