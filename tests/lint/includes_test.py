#!/usr/bin/env python3
"""Includes go one way: hosts and examples -> abi <- core; abi <- libs <- plugins.

  abi                 <stddef.h>, <stdint.h> and "strata/..."
  core/manifest       its own files and core/status.h
  core/plugins        the same, core/hash.h and core/manifest
  core/weights, core/gradients, core/update
                      of core, but not a later one of these, and nothing of what stands on them: engine, capi,
                      checkpoints, tensors
  core                no plugin, and no header of a backend (CUDA, NCCL, HDF5, MPI, io_uring, CBLAS)
  libs, plugins       never core/; a plugin sees "strata/...", libs and its own folder, never another plugin
  hosts, examples     "strata/strata.h" and their own files
A header of a backend is included only by the plugins made for it.
"""
import re
import sys

import house

BACKENDS = {  # header -> the folders that are made for it
    r"cuda|cub/|cooperative_groups|nv|cublas": r"plugins/\w*(cuda|nccl|adamw)\w*|libs/cuda\w*|bench|tests",
    r"nccl": r"plugins/comm_nccl|bench|tests",
    r"hdf5|H5": r"plugins/checkpoint|bench|tests",
    r"mpi\.h|mpi/": r"plugins/comm_mpi|bench|tests",
    r"liburing|libaio": r"plugins/offload_nvme|libs/io|bench|tests",
    r"cblas|openblas|oneapi/|dnnl": r"examples|bench|tests",
}

ROOMS = ("weights", "gradients", "update")  # each may use those before it
ABOVE = ("core/engine.h", "core/snapshot.h", "core/tensors.h", "core/progress.h")


def exists(*parts):
    return house.ROOT.joinpath(*parts).is_file()


def wrong(path, quote, name):
    """Why this include is not allowed, or None."""
    top = path.parts[0]
    if quote == "<" and name.startswith(("strata/", "core/", "plugins/", "libs/")):
        return "files of this tree are included with quotes"
    for header, folders in BACKENDS.items():
        if re.match(header, name) and quote == "<" and not re.match(f"({folders})(/|$)", path.as_posix()):
            return "a backend's header, outside the folders made for it"
    if top == "abi":
        allowed = name.startswith("strata/") if quote == '"' else name in ("stddef.h", "stdint.h")
        return None if allowed else "abi includes <stddef.h>, <stdint.h> and strata/ only"
    if quote == "<":
        return None
    if path.parts[:2] == ("core", "manifest") and quote == '"':
        own = name.startswith(("core/manifest/", "strata/")) or name == "core/status.h"
        return None if own else "core/manifest includes its own files, core/status.h and strata/ only"
    if path.parts[:2] == ("core", "plugins"):
        own = name.startswith(("core/plugins/", "core/manifest/", "strata/"))
        own = own or name in ("core/status.h", "core/hash.h")
        return None if own else "core/plugins includes its own files, core/manifest and strata/ only"
    if top == "core" and path.parts[1] in ROOMS:
        later = tuple(f"core/{room}/" for room in ROOMS[ROOMS.index(path.parts[1]) + 1:])
        if name in ABOVE or name.startswith(later):
            return f"core/{path.parts[1]} includes nothing of what stands on it"
    if top == "core":
        return None if name.startswith(("core/", "strata/")) else "core includes core/ and strata/ only"
    if top in ("plugins", "libs"):
        own = ".." not in name and (exists(path.parent, name) or exists(*path.parts[:2], name))
        allowed = name.startswith("strata/") or exists("libs", name) or own
        return None if allowed else f"{top} include strata/, libs and their own folder only"
    if top in ("hosts", "examples"):
        own = exists(path.parent, name) and ".." not in name
        return None if name == "strata/strata.h" or own else f"{top} include strata/strata.h and their own files only"
    return None


def main():
    failures, count = [], 0
    for path in house.files():
        for line, quote, name in house.includes(path):
            count += 1
            why = wrong(path, quote, name)
            if why:
                failures.append(f"{path}:{line}: includes {name}: {why}")
    return house.report(f"{count} includes", failures)


if __name__ == "__main__":
    sys.exit(main())
