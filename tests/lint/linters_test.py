#!/usr/bin/env python3
"""Tests the lints: each must find what it is for, and leave alone what is right."""
import pathlib
import sys
import tempfile
import unittest
import xml.etree.ElementTree as tree

import abi_rules_test
import house
import includes_test
import abi_headers
import sz
import test_counts

HEADER = """/* x.h - ends with a thread default or not. */
typedef struct strata_x_api {
  uint32_t struct_size;
  uint32_t abi_minor;
  void(STRATA_CALL *tagged)(void *ctx); /* [any] */
  void(STRATA_CALL *inherits)(void *ctx);
  /* Says nothing of threads. */
  strata_status(STRATA_CALL *untagged)(void *ctx, uint64_t n,
                                       void(STRATA_CALL *fn)(void *arg, uint64_t i), void *arg);
} strata_x_api;
"""


class Includes(unittest.TestCase):
    def verdict(self, path, include):
        quote = "<" if include[0] == "<" else '"'
        return includes_test.wrong(pathlib.Path(path), quote, include.strip('<>"'))

    def test_refused(self):
        for path, include in [
                ("abi/strata/abi.h", "<stdio.h>"), ("abi/strata/iface/device.h", '"core/plugins/host.h"'),
                ("core/engine.cc", '"plugins/null/null.h"'), ("core/engine.cc", "<cuda_runtime.h>"),
                ("core/engine.cc", "<nccl.h>"), ("core/engine.cc", "<hdf5.h>"), ("core/engine.cc", "<mpi.h>"),
                ("core/engine.cc", "<liburing.h>"), ("core/update/updater.h", '"core/engine.h"'),
                ("core/weights/weights.h", '"core/gradients/gradients.h"'),
                ("core/gradients/gradients.h", '"core/tensors.h"'),
                ("plugins/null/null.c", '"core/plugins/host.h"'),
                ("plugins/null/null.c", '"fault.h"'), ("plugins/null/null.c", '"../fault/shim.h"'),
                ("plugins/null/null.c", "<hdf5.h>"), ("libs/io/direct_file.cc", '"core/status.h"'),
                ("examples/gpt/main.cc", '"strata/host.h"'), ("examples/gpt/main.cc", '"libs/io/direct_file.h"'),
                ("hosts/c/train.c", '"core/engine.h"'), ("hosts/c/train.c", "<strata/strata.h>")]:
            self.assertTrue(self.verdict(path, include), (path, include))

    def test_allowed(self):
        for path, include in [
                ("abi/strata/abi.h", "<stdint.h>"), ("abi/strata/host.h", '"strata/types.h"'),
                ("core/engine.cc", '"core/engine.h"'), ("core/plugins/log.cc", "<spdlog/spdlog.h>"),
                ("plugins/null/null.c", '"null.h"'), ("plugins/null/null.c", '"strata/plugin.h"'),
                ("plugins/checkpoint/h5.cc", "<hdf5.h>"), ("examples/gpt/main.cc", '"strata/strata.h"')]:
            self.assertIsNone(self.verdict(path, include), (path, include))


class ThreadTags(unittest.TestCase):
    def test_untagged(self):
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "x.h"
            path.write_text(HEADER)
            header = abi_headers.read_header(path)
        slots = header.structs[0].slots
        self.assertEqual([slot.name for slot in abi_rules_test.untagged(slots, False)], ["untagged"])
        self.assertEqual(list(abi_rules_test.untagged(slots, True)), [])

    def test_unreadable_is_an_error(self):
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "x.h"
            path.write_text("int strata_global;\n")
            with self.assertRaises(abi_headers.Unreadable):
                abi_headers.read_header(path)


class Sizes(unittest.TestCase):
    def test_functions(self):
        code = ('namespace a {\nclass B : C {\n  int f() const {\n    return g({1});\n  }\n  int x_{0};\n};\n'
                'static const table t = {\n  {1},\n};\nint h(int a,\n      int b) {\n  // } {\n  if (a) {\n  }\n'
                '  auto l = [&](int i) { return "}"; };\n}\n}  // namespace a\n')
        self.assertEqual([(name, size) for _, size, name in sz.functions(code)], [("f", 3), ("h", 7)])


class Counts(unittest.TestCase):
    def outcome(self, xml):
        return test_counts.outcome(tree.fromstring(xml))

    def test_outcomes(self):
        self.assertEqual(self.outcome('<testcase status="run"/>'), ("passed", ""))
        self.assertEqual(self.outcome('<testcase status="fail"><failure message="x"/></testcase>'), ("failed", "x"))
        self.assertEqual(self.outcome('<testcase><skipped type="pytest.skip" message="no torch"/></testcase>'),
                         ("skipped", "no torch"))
        said = '<skipped message="SKIP_RETURN_CODE=77"/><system-out>skipped: no clang\n</system-out>'
        self.assertEqual(self.outcome(f'<testcase status="notrun">{said}</testcase>'), ("skipped", "no clang"))
        said = '<skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/><system-out>x.cc:3: Skipped\nno AVX\n</system-out>'
        self.assertEqual(self.outcome(f'<testcase status="notrun">{said}</testcase>'), ("skipped", "no AVX"))


class Files(unittest.TestCase):
    def test_generated_and_frozen_files_are_left_out(self):
        paths = [path.as_posix() for path in house.files()]
        self.assertIn("abi/strata/abi.h", paths)
        self.assertFalse([path for path in paths if path.startswith("build/") or "frozen_1_0" in path])


if __name__ == "__main__":
    unittest.main()
