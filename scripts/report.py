"""Writes an HTML page about runs; the command is `cssl-report`."""
from cssl.program import exit_on_user_error
from cssl.tools import report

exit_on_user_error(report.main)
