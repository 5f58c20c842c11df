"""Shows what augmentation does; the command is `cssl-sheets`."""
from cssl.program import exit_on_user_error
from cssl.tools import sheets

exit_on_user_error(sheets.main)
