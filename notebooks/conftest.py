"""nbval injects no parameters: collected here, the notebooks run the smoke profile and write below build/."""

import os
from pathlib import Path

os.environ.setdefault("PSA_PROFILE", "smoke")
os.environ.setdefault("PSA_OUT", str(Path(__file__).resolve().parent.parent / "build" / "smoke"))
