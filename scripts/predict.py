"""Classifies image files with a run or an export; the command is `cssl-predict`."""
from cssl.program import exit_on_user_error
from cssl.tools import predict

exit_on_user_error(predict.main)
