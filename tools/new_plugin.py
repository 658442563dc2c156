#!/usr/bin/env python3
"""Makes a plugin folder that compiles: plugins/null under a new name, with the interfaces asked for.

    tools/new_plugin.py NAME --interface strata.offload/1 [--interface ...] [DIR]

DIR is the folder to make (default: NAME, in the working directory). In plugins/ of this tree the build finds it;
anywhere else its CMakeLists.txt is a project of its own against an installed Strata. The result does as little as null
does and passes what null passes: change it slot by slot. Exit codes: 0 made, 1 not possible here, 2 usage.
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "plugins" / "null"
INTERFACES = {f"strata.{name}/1": name for name in ("device", "offload", "collective", "optimizer", "checkpoint")}
NEEDS_NUMBERS = {"device", "collective", "optimizer"}  # those whose file includes null_numbers.h

SHIPPED = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/*.toml"))
C_KEYWORDS = set("auto break case char const continue default do double else enum extern float for goto if inline int "
                 "long register restrict return short signed sizeof static struct switch typedef union unsigned void "
                 "volatile while".split())

PROJECT = """# The plugin {name}, built against an installed Strata, whose place is given by CMAKE_PREFIX_PATH.
cmake_minimum_required(VERSION 3.25)
project({name} LANGUAGES C)
find_package(Strata REQUIRED)
"""
README = """# {name}

{interfaces}, made from Strata's `null` plugin. As it is it does as little as null does;
say here what it does now, its options, and what it does not do.

    cmake -S . -B build -DCMAKE_PREFIX_PATH=<where Strata is installed>
    cmake --build build
    STRATA_PLUGIN_PATH=$PWD/build/plugins strata plugins

Or with the compiler alone, with the library beside its TOML:

    {cc}

A manifest chooses it by `[plugins] {role} = "{name}"`.
"""
ROLES = {"device": "device", "offload": "offload_cpu", "collective": "collective", "optimizer": "optimizer",
         "checkpoint": "checkpoint"}


def renamed(text, name):
    """The template's text with its own name replaced, in identifiers and in words; NULL stays."""
    text = re.sub(r"\bnull(?=_|\b)", name, text)
    return text.replace("STRATA_PLUGIN_NULL", f"STRATA_PLUGIN_{name.upper()}")


def without(text, interfaces):
    """The text without the lines that only these interfaces need."""
    words = [word for i in interfaces for word in (f"STRATA_{i.upper()})", f"iface/{i}.h", f"strata_{i}_api null_{i};")]
    return "".join(line for line in text.splitlines(True) if not any(word in line for word in words))


def plugin_files(name, chosen, inside):
    """{file name: text} of the whole folder."""
    others = [i for i in INTERFACES.values() if i not in chosen]
    sources = ["null.c"] + [f"null_{i}.c" for i in chosen]
    headers = ["null.h"] + (["null_numbers.h"] if NEEDS_NUMBERS & set(chosen) else [])
    texts = {f: (TEMPLATE / f).read_text() for f in sources + headers}
    for shared in ("null.c", "null.h"):
        texts[shared] = without(texts[shared], others)
    files = {renamed(f, name): renamed(text, name) for f, text in texts.items()}

    ids = [f"strata.{i}/1" for i in chosen]
    toml = (TEMPLATE / "null.toml").read_text()
    toml = re.sub(r"(?m)^name = .*$", f'name = "{name}: {", ".join(ids)}"', toml)
    toml = re.sub(r"(?m)^interfaces = .*$", "interfaces = [" + ", ".join(f'"{i}"' for i in ids) + "]", toml)
    files[f"{name}.toml"] = renamed(toml, name)

    listed = " ".join(renamed(f, name) for f in sources)
    call = f"strata_add_plugin({name} SOURCES {listed} LIBS m)\n"
    files["CMakeLists.txt"] = call if inside else PROJECT.format(name=name) + call
    cc = (f"cc -std=c11 -O2 -fPIC -shared -fvisibility=hidden -ffp-contract=off $(pkg-config --cflags strata) "
          f"*.c -lm -o {name}.so")
    files["README.md"] = README.format(name=name, interfaces=", ".join(f"`{i}`" for i in ids), cc=cc,
                                       role=ROLES[chosen[0]])
    return files


def format_code(folder):
    """Names of another length break lines elsewhere; the house's formatter knows where, if it is installed."""
    formatter = shutil.which("clang-format-14")
    if formatter:
        subprocess.run([formatter, "-i", f"--style=file:{ROOT / '.clang-format'}", *folder.glob("*.[ch]")], check=True)


def plugin_name(text):
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", text) or text.startswith("strata") or text in C_KEYWORDS:
        raise argparse.ArgumentTypeError(f"{text!r}: a plugin's name is a lower-case C identifier of at most 40 "
                                         "characters, no keyword and not strata...")
    if text in SHIPPED:
        raise argparse.ArgumentTypeError(f"{text!r} comes with Strata; a manifest could not tell the two apart")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("name", type=plugin_name, metavar="NAME")
    parser.add_argument("--interface", action="append", required=True, choices=INTERFACES, metavar="ID",
                        help=f"may be repeated: {', '.join(INTERFACES)}")
    parser.add_argument("dir", nargs="?", type=pathlib.Path, metavar="DIR", help="the folder to make (default: NAME)")
    args = parser.parse_intermixed_args()  # DIR may follow the options
    folder = (args.dir or pathlib.Path(args.name)).resolve()
    inside = folder.parent == ROOT / "plugins"
    if inside and folder.name != args.name:
        parser.error(f"in plugins/ of this tree the folder of {args.name} is plugins/{args.name}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        print(f"{folder} exists already: nothing was changed", file=sys.stderr)
        return 1
    chosen = [i for i in INTERFACES.values() if f"strata.{i}/1" in args.interface]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in plugin_files(args.name, chosen, inside).items():
            (folder / file).write_text(text)
        format_code(folder)
    except OSError as e:
        print(f"{folder}: {e.strerror}: {e.filename}", file=sys.stderr)
        return 1
    print(f"{folder}: {args.name}, {', '.join(args.interface)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
