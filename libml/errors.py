"""The one exception type whose message is meant for the person at the command line."""
import inspect


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


def check_function(function: object, name: str, *arguments: str) -> None:
    """Raises UserError unless something can be called with these arguments, in their order."""
    found, fits = type(function).__name__, callable(function)
    if callable(function):
        try:
            signature = inspect.signature(function)
            found = getattr(function, "__name__", found) + str(signature)
            signature.bind(*arguments)
        except TypeError:
            fits = False
        except ValueError:  # a builtin that does not say what it takes
            pass
    if not fits:
        raise UserError(f"{name} is {found}; expected a function of {' and '.join(arguments)}.")
