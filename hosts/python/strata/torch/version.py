"""Needs torch 2.4 or newer: importing this says so where it is older."""
import re

import torch

NEEDED = (2, 4)
found = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
if found < NEEDED:
    raise ImportError(f"strata.torch needs torch {'.'.join(map(str, NEEDED))} or newer, found torch "
                      f"{torch.__version__} in {torch.__path__[0]}")
