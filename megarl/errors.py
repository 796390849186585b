"""Errors that are meant for the person at the terminal: they become one plain sentence and an exit code, never a traceback."""


class UserError(Exception):
    """Something the user can mend: bad input, a missing file, a taken port. The command ends with exit code 2."""


class ConfigError(UserError):
    """Everything that is wrong with a configuration, listed at once."""

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class RunError(Exception):
    """A run that had started and cannot go on: a dead worker, a refused weight update, a full disk. Exit code 1."""
