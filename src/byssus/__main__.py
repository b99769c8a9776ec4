"""`python -m byssus` is the command `byssus`."""

import sys

from byssus.cli import main

sys.exit(main())
