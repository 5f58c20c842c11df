"""Writes a run's model for others to load; the command is `cssl-export`."""
from cssl.program import exit_on_user_error
from cssl.tools import export

exit_on_user_error(export.main)
