#!/usr/bin/env python3
"""Shared libraries export what they promise and nothing else.

    exports_test.py BUILD_DIR

Each lib/plugins/*.so exports strata_plugin_entry_v1 alone; libstrata.so exports exactly the functions of strata.h.
"""
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import abi_headers  # noqa: E402


def exports(library):
    output = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    symbols = [line.split() for line in output.splitlines()]
    # "A" is the name of a symbol version, not a symbol.
    return {fields[-1].split("@")[0] for fields in symbols if fields[-2] != "A"}


def main():
    build = pathlib.Path(sys.argv[1])
    failures = []
    plugins = sorted((build / "lib" / "plugins").glob("*.so"))
    for plugin in plugins:
        found = exports(plugin)
        if found != {"strata_plugin_entry_v1"}:
            failures.append(f"{plugin.name} exports {', '.join(sorted(found)) or 'nothing'}")
    header = abi_headers.read_header(abi_headers.ABI / "strata.h")
    promised, found = {slot.name for slot in header.functions}, exports(build / "lib" / "libstrata.so")
    failures += [f"libstrata.so exports {name}, which strata.h does not declare" for name in sorted(found - promised)]
    failures += [f"libstrata.so does not export {name} of strata.h" for name in sorted(promised - found)]
    print("\n".join(failures))
    print(f"{len(plugins)} plugins, {len(promised)} functions of strata.h, {len(failures)} failures")
    return 1 if failures or not plugins else 0


if __name__ == "__main__":
    sys.exit(main())
