"""What a process that others are forked from imports last: each of them would find out the same from the installed
packages, and a collection of theirs would look through all that is loaded, and so copy its pages."""

import gc

from tenuto.state.frameworks import declared

declared()
gc.freeze()
