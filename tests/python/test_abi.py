"""hosts/python/strata/_abi.py says what abi/strata/strata.h says.

The names come from the header's text, the numbers from a C compiler: a struct, field, function or constant that is
added to the header and not to _abi.py fails here.
"""
import ctypes
import os
import re
import shutil
import subprocess

import pytest

from host_library import ROOT
from strata import _abi

COMPILER = shutil.which(os.environ.get("CC", "cc"))
HEADERS = ROOT / "abi" / "strata"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def source(name):
    """A header without comments."""
    return re.sub(r"/\*.*?\*/", "", (HEADERS / name).read_text(), flags=re.S)


def structs_of_the_host_api():
    """{struct: [field names]} of strata.h, and of what it uses from types.h."""
    found = {}
    for header in ("types.h", "strata.h"):
        for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", source(header), flags=re.S):
            if header == "strata.h" or name in ("strata_tensor", "strata_stream"):
                found[name] = [re.search(r"(\w+)(\[\d+\])?$", field.strip()).group(1)
                               for field in body.split(";") if field.strip()]
    return found


def run_c(tmp_path, lines):
    """What a C program of printf statements prints, as numbers."""
    program = tmp_path / "abi.c"
    program.write_text('#include <stddef.h>\n#include <stdio.h>\n#include "strata/strata.h"\nint main(void) {\n'
                       + "".join(f'  printf("%lld\\n", (long long)({line}));\n' for line in lines) + "  return 0;\n}\n")
    binary = tmp_path / "abi"
    subprocess.run([COMPILER, "-std=c11", "-I", str(ROOT / "abi"), str(program), "-o", str(binary)], check=True)
    return [int(n) for n in subprocess.run([binary], check=True, capture_output=True, text=True).stdout.split()]


def test_every_struct_has_the_headers_fields_in_order():
    structs = structs_of_the_host_api()
    assert len(structs) >= 9
    for name, fields in structs.items():
        assert [field for field, _ in getattr(_abi, name)._fields_] == fields, name


@needs_compiler
def test_sizes_and_offsets_are_the_compilers(tmp_path):
    expected, lines = [], []
    for name in structs_of_the_host_api():
        struct = getattr(_abi, name)
        lines.append(f"sizeof({name})")
        expected.append((name, ctypes.sizeof(struct)))
        for field, _ in struct._fields_:
            lines += [f"offsetof({name}, {field})", f"sizeof((({name} *)0)->{field})"]
            descriptor = getattr(struct, field)
            expected += [(f"{name}.{field} offset", descriptor.offset), (f"{name}.{field} size", descriptor.size)]
    assert expected == [(what, number) for (what, _), number in zip(expected, run_c(tmp_path, lines))]


@needs_compiler
def test_constants_are_the_compilers(tmp_path):
    constants = {f"STRATA_{name}": value for name, value in _abi.STATUS.items()}
    constants.update({f"STRATA_{name}": getattr(_abi, name) for name in dir(_abi)
                      if name.startswith(("LOG_", "COUNT_", "PARAM_")) or name in ("F32", "BF16", "F16", "CPU")})
    assert list(constants.values()) == run_c(tmp_path, constants)
    status_enum = re.search(r"typedef int32_t strata_status;\s*enum \{(.*?)\}", source("abi.h"), flags=re.S).group(1)
    assert len(_abi.STATUS) == len(re.findall(r"STRATA_\w+ =", status_enum))


def test_every_function_is_declared_with_its_arguments():
    kinds = {"int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64,
             "strata_status": ctypes.c_int32, "strata_unit": ctypes.c_uint32, "strata_param": ctypes.c_uint32,
             "strata_counter_span": ctypes.c_int32, "const char *": ctypes.c_char_p,
             "const char **": ctypes.POINTER(ctypes.c_char_p),
             "void": None, "void *": ctypes.c_void_p, "const void **": ctypes.POINTER(ctypes.c_void_p),
             "strata_engine *": ctypes.c_void_p, "strata_engine **": ctypes.POINTER(ctypes.c_void_p),
             "uint64_t *": ctypes.POINTER(ctypes.c_uint64)}
    kinds.update({f"{n} *": ctypes.POINTER(ctypes.c_uint32) for n in ("strata_unit", "strata_param", "strata_group")})
    kinds.update({f"{name} *": ctypes.POINTER(getattr(_abi, name)) for name in structs_of_the_host_api()})

    def kind(text):
        text = " ".join(text.replace("*", " * ").split()).replace("* *", "**")
        return kinds[text] if text in kinds else kinds[text.removeprefix("const ")]

    declared = {}
    functions = r"STRATA_API ([\w ]+\*?)\s*STRATA_CALL (\w+)\((.*?)\);"
    for result, name, arguments in re.findall(functions, source("strata.h"), flags=re.S):
        types = [] if arguments.strip() == "void" else [re.sub(r"\w+$", "", a.strip()) for a in arguments.split(",")]
        declared[name] = (kind(result), [kind(t) for t in types])
    assert len(declared) > 25
    assert declared == _abi.PROTOTYPES
