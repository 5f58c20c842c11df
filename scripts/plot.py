"""Plots runs; the command is `cssl-plot`."""
from cssl.program import exit_on_user_error
from cssl.tools import plot

exit_on_user_error(plot.main)
