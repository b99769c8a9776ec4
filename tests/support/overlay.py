"""Where AgentScope is installed for its tests, beside the packages that it does not go with."""

from __future__ import annotations

import sys
from pathlib import Path

OVERLAY = Path(sys.prefix) / "agentscope"
STAMP = OVERLAY.with_name(".overlaid")  # the Makefile writes it when the overlay is complete
