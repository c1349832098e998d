"""A plugin of pytest: puts this package's process groups in the place of torchft's, of the same
names, for torchft's own tests. Its ProcessGroupGloo is the class that TORCHFT_EXT_TEST_GROUP names.
"""

from __future__ import annotations

import os

import torchft.process_group as theirs

from torchft_ext import process_group as ours

for _name in ours.__all__:
    if hasattr(theirs, _name):
        setattr(theirs, _name, getattr(ours, _name))
theirs.ProcessGroupGloo = getattr(ours, os.environ["TORCHFT_EXT_TEST_GROUP"])
