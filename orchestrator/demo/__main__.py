"""``python -m orchestrator.demo``."""

import sys

from orchestrator.demo.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
