"""The one exception type whose message is meant for the person at the command line."""


class UserError(ValueError):
    """Bad input: one line that says what came, what was expected and how to fix it."""

    exit_code = 2


class OptionError(UserError):
    """A bad value of an option; the message starts with its name, which the command line writes as a flag."""
