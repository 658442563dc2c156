"""tier.py - offload_nvme for Python benches, through the C functions of tier.cc; and what they have in common."""
import ctypes
import json
import os
import sys

KINDS = ("read", "write")
MB = 1e6


class Library:
    def __init__(self, build):
        self.c = ctypes.CDLL(os.path.join(build, "bench", "bench_nvme_python.so"))
        self.c.bench_tier_open.restype = ctypes.c_void_p
        self.c.bench_tier_open.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        self.c.bench_tier_bytes.restype = ctypes.c_uint64
        self.c.bench_tier_rate.restype = ctypes.c_double
        self.c.bench_tier_rate.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self.c.bench_tier_pipeline_rate.restype = ctypes.c_double
        self.c.bench_tier_pipeline_rate.argtypes = [ctypes.c_void_p]
        self.c.bench_fio_rate.restype = ctypes.c_double
        self.c.bench_fio_rate.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self.c.bench_tier_close.argtypes = [ctypes.c_void_p]
        self.bytes = self.c.bench_tier_bytes()


class Tier:
    """A region of Library.bytes on these paths."""

    def __init__(self, library, *paths, probe_ms=500):
        self.library = library
        self.handle = library.c.bench_tier_open(", ".join(paths).encode(), probe_ms)

    def rate(self, kind):
        """Bytes per second of moving the region once."""
        return self.library.c.bench_tier_rate(self.handle, kind.encode())

    def pipeline_rate(self):
        """Of an update's transfers, reads and writes at once, without an update."""
        return self.library.c.bench_tier_pipeline_rate(self.handle)

    def close(self):
        self.library.c.bench_tier_close(self.handle)


def skip(name, reason):
    print(f"skipped: {reason}")
    print(json.dumps({"name": name, "value": None, "skipped": reason}))
    sys.exit(77)
