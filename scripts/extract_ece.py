"""Writes stats/ece.json of runs; the command is `cssl-extract --metric=ece`."""
from cssl.program import exit_on_user_error
from cssl.tools import extract

exit_on_user_error(lambda: extract.main("ece"))
