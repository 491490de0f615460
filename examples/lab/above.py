"""Imported before anything from the folder above: the lab uses the users' examples, never the other way round."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
