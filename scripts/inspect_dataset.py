"""Shows what is in a dataset; the command is `cssl-inspect`."""
from cssl.program import exit_on_user_error
from cssl.tools import inspect

exit_on_user_error(inspect.main)
