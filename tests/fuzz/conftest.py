"""The targets are imported by their own names, by pytest as by run_atheris.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
