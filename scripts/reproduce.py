"""Runs what is behind the paper's tables; the command is `cssl-reproduce`."""
from cssl.program import exit_on_user_error
from cssl.tools import reproduce

exit_on_user_error(reproduce.main)
