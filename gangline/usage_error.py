"""The error of a wrong option of a command."""


class UsageError(ValueError):
    """Wrong value of a command-line option: the command prints one line and ends with exit code 2."""
