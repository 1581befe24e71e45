"""`python -m tokcap`: the command, where its script is not on the path."""

from __future__ import annotations

import sys

from .command import main

sys.exit(main())
