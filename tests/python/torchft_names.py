"""A plugin of pytest: puts this package's process groups in the place of torchft's, of the same
names, for torchft's own tests. ProcessGroupHost stands for its ProcessGroupGloo."""

from __future__ import annotations

import torchft.process_group as theirs

from torchft_ext import process_group as ours

for _name in ours.__all__:
    if hasattr(theirs, _name):
        setattr(theirs, _name, getattr(ours, _name))
theirs.ProcessGroupGloo = ours.ProcessGroupHost
