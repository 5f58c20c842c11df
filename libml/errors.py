"""The one exception type whose message is meant for the person at the command line."""


def printable(text: object) -> str:
    """Returns text for one line of a terminal: control characters, which names of files may have, are escaped."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode()
                   for letter in str(text))


class UserError(ValueError):
    """Bad input: one line that says what came, what was expected and how to fix it."""

    exit_code = 2

    def __str__(self) -> str:
        return printable(super().__str__())


class OptionError(UserError):
    """A bad value of an option; the message starts with its name, which the command line writes as a flag."""
