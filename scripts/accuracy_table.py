"""Prints results over seeds; the command is `cssl-table`."""
from cssl.program import exit_on_user_error
from cssl.tools import table

exit_on_user_error(table.main)
