"""One rank of test_accelerate.test_two_ranks_by_the_launcher, which names the YAML file. OUT is a folder."""
import json
import pathlib
import sys

import conftest  # noqa: F401 paths and threads
import hf


def reference():
    plain = hf.prepared(False)
    return {"plain": hf.loop(*plain), "plain predictions": hf.evaluate(*plain[:2]).tolist()}


def main(out):
    found = reference()
    hf.free_ddp()
    hf.AcceleratorState._reset_state()
    mine, *parts = hf.prepared(True, False)
    mine.print("from the main process")
    first = hf.loop(mine, *parts, epochs=1)
    mine.save_state(out / "state")
    rest = hf.loop(mine, *parts, epochs=1)
    found["ours"], found["rest"] = first + rest, rest
    found["predictions"] = hf.evaluate(mine, parts[0]).tolist()
    found["report"] = mine.report
    mine.load_state(out / "state")
    found["resumed"] = hf.loop(mine, *parts, epochs=1)
    (out / f"rank{mine.process_index}.json").write_text(json.dumps(found))
    mine.end_training()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
