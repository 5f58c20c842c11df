"""Downloads and prepares datasets; the command is `cssl-data`."""
from cssl.program import exit_on_user_error
from cssl.tools import data

exit_on_user_error(data.main)
