"""Writes stats/accuracy.json of runs; the command is `cssl-extract`."""
from cssl.program import exit_on_user_error
from cssl.tools import extract

exit_on_user_error(extract.main)
