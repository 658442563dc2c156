"""Needs transformers 5 or newer: importing this says so where it is older."""
import transformers

# Trainers of 4 count micro-batches at an epoch's end, and tokens over ranks, in other ways.
if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(f"strata.transformers needs transformers 5 or newer, found transformers "
                      f"{transformers.__version__} in {transformers.__path__[0]}")
