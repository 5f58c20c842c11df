"""Says whether this machine computes what it should; the command is `cssl-doctor`."""
from cssl.program import exit_on_user_error
from cssl.tools import doctor

exit_on_user_error(doctor.main)
