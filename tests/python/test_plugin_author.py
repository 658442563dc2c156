"""A plugin author's way, outside this tree: Strata installed and moved, a plugin made by tools/new_plugin.py, built
with CMake and with the compiler alone, found, checked and used in training.
"""
import os
import re
import shutil
import subprocess
import sys

import pytest

from host_library import BUILD, ROOT

INTERFACES = [f"strata.{name}/1" for name in ("device", "offload", "collective", "optimizer", "checkpoint")]
NEW_PLUGIN = ROOT / "tools" / "new_plugin.py"
HOST = '#include "strata/strata.h"\n#include <stdio.h>\nint main(void) { return puts(strata_version()) < 0; }\n'


def run(*command, code=0, cwd=None, **environment):
    env = {key: value for key, value in os.environ.items() if not key.startswith("STRATA_")}
    result = subprocess.run([str(word) for word in command], cwd=cwd, env=env | environment, capture_output=True,
                            text=True, timeout=100)
    assert result.returncode == code, f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


def make(*arguments, code=0, cwd=None):
    return run(sys.executable, NEW_PLUGIN, *arguments, code=code, cwd=cwd)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """An installation, moved after it was made."""
    folder = tmp_path_factory.mktemp("installed")
    run("cmake", "--install", BUILD, "--prefix", folder / "first")
    (folder / "first").rename(folder / "moved")
    return folder / "moved"


def test_the_installed_command_finds_its_plugins(prefix):
    out = run(prefix / "bin" / "strata", "plugins")
    libraries = re.findall(r"^  (/.*\.so)$", out, flags=re.M)
    assert len(libraries) >= 6 and all(path.startswith(f"{prefix}/lib/strata/plugins/") for path in libraries)
    run(prefix / "bin" / "strata", "check", ROOT / "examples" / "manifests" / "zero3_cpu.toml")
    assert not list(prefix.rglob("*.in")) and not list((prefix / "lib" / "cmake").rglob("*[Tt]argets*"))


def test_no_installed_text_names_the_first_place(prefix):
    for file in prefix.rglob("*"):
        if file.is_file() and file.suffix != ".so" and b"\0" not in file.read_bytes():
            text = file.read_text()
            assert "/first" not in text and str(BUILD) not in text, file


def test_a_host_by_pkg_config_trains_with_installed_plugins(prefix, tmp_path):
    env = {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", "strata", **env).split()
    libraries = run("pkg-config", "--variable=libdir", "strata", **env).strip()
    program = tmp_path / "train"
    run("cc", "-std=c11", ROOT / "examples" / "c" / "train.c", *flags, "-lm", f"-Wl,-rpath,{libraries}", "-o",
        program)
    assert "step 200" in run(program, ROOT / "examples" / "c" / "train.toml")


# The plugin of each interface as somebody would build it: the flags of the README that is made, and every warning.
@pytest.mark.parametrize("interface", INTERFACES)
def test_made_plugins_build_with_the_compiler_alone(prefix, tmp_path, interface):
    folder = tmp_path / "mine"
    make("mine", "--interface", interface, cwd=tmp_path)
    command = re.search(r"^    (cc .*)$", (folder / "README.md").read_text(), flags=re.M).group(1)
    strict = command.replace("cc ", "cc -pedantic -Wall -Wextra -Wshadow -Werror ", 1)
    run("sh", "-c", strict, cwd=folder, PKG_CONFIG_PATH=str(prefix / "lib" / "pkgconfig"))
    out = run(prefix / "bin" / "strata", "plugins", STRATA_PLUGIN_PATH=str(folder))
    assert re.search(rf"^mine 0\.1\.0  {interface}\n  .*\n  {folder}/mine\.so\n(?!  warning)", out, flags=re.M), out
    text = "".join(file.read_text() for file in folder.glob("*.[cht]*"))
    assert not re.search(r"\bnull(_|\b)", text) and "STRATA_PLUGIN_NULL" not in text, "the template's name is left"


def test_a_made_plugin_builds_with_cmake_installs_and_trains(prefix, tmp_path):
    folder = tmp_path / "mine"
    make("mine", "--interface", "strata.offload/1", "--interface", "strata.optimizer/1", folder)
    assert len((folder / "CMakeLists.txt").read_text().splitlines()) <= 6
    run("cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", folder / "build")
    run("cmake", "--install", folder / "build", "--prefix", tmp_path / "own")
    manifest = tmp_path / "run.toml"
    manifest.write_text((ROOT / "examples" / "c" / "train.toml").read_text()
                        + "\n[plugins]\noptimizer = 'mine'\npath = ['own/lib/strata/plugins']\n")
    out = run(prefix / "bin" / "strata", "check", manifest)
    assert f"mine 0.1.0, {tmp_path}/own/lib/strata/plugins/mine.so" in out
    out = run(BUILD / "bin" / "c_train", manifest)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 4 and losses[-1] > 0.5 * losses[0], "an optimizer that does nothing was used"


def test_a_cmake_project_may_link_everything_the_package_has(prefix, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(all LANGUAGES C CXX)\nfind_package(Strata 0.1 REQUIRED)\n"
        "add_executable(host host.c)\ntarget_link_libraries(host strata::strata)\n"
        "add_library(kit OBJECT kit.cc)\ntarget_link_libraries(kit strata::plugin_kit)\n")
    (tmp_path / "host.c").write_text(HOST)
    (tmp_path / "kit.cc").write_text('#include "plugin_kit/plugin_kit.h"\nint unused;\n')
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path / "build")
    assert re.match(r"\d+\.\d+\.\d+\n", run(tmp_path / "build" / "host"))


def test_a_plugin_without_its_entry_does_not_build(prefix, tmp_path):
    folder = tmp_path / "mine"
    make("mine", "--interface", "strata.offload/1", folder)
    source = folder / "mine.c"
    source.write_text(source.read_text().replace("strata_plugin_entry_v1(", "static_entry(").replace(
        "const strata_plugin* STRATA_CALL static", "extern const strata_plugin* STRATA_CALL static"))
    run("cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    result = subprocess.run(["cmake", "--build", folder / "build"], capture_output=True, text=True, timeout=100)
    assert result.returncode != 0
    assert "must export strata_plugin_entry_v1" in result.stdout + result.stderr
    assert not (folder / "build" / "plugins" / "mine.so").exists()
    assert not (folder / "build" / "plugins" / "mine.toml").exists(), "found by every search, and broken"


def test_a_plugin_is_found_when_it_is_built_and_as_its_toml_is_now(prefix, tmp_path):
    folder, copy = tmp_path / "mine", tmp_path / "mine" / "build" / "plugins" / "mine.toml"
    make("mine", "--interface", "strata.offload/1", folder)
    run("cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    assert not copy.exists()
    for text in ("mine: ", "mine, edited: "):
        source = folder / "mine.toml"
        source.write_text(source.read_text().replace("mine: ", text))
        run("cmake", "--build", folder / "build")
        assert text in copy.read_text()


def test_conformance_tests_run_on_a_plugin_from_outside(prefix, tmp_path):
    make("mine", "--interface", "strata.device/1", tmp_path / "mine")
    run("cmake", "-S", tmp_path / "mine", "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}",
        "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "--build", tmp_path / "build")
    out = run(BUILD / "tests" / "conformance_device_test", "--gtest_filter=*/Device.*/mine",
              STRATA_TEST_PLUGIN=str(tmp_path / "build" / "plugins" / "mine.so"))
    assert re.search(r"\[  PASSED  \] [1-9]\d* tests?\.", out), out


@pytest.mark.parametrize("arguments, code, text", [
    (["x"], 2, "--interface"), (["x", "--interface", "strata.offload/2"], 2, "invalid choice"),
    (["Upper", "--interface", "strata.offload/1"], 2, "lower-case C identifier"),
    (["strata_x", "--interface", "strata.offload/1"], 2, "not strata"),
    (["null", "--interface", "strata.offload/1"], 2, "comes with Strata"),
    (["comm_local", "--interface", "strata.offload/1", "elsewhere"], 2, "comes with Strata"),
    (["register", "--interface", "strata.offload/1"], 2, "no keyword"),
    (["x", "--interface", "strata.offload/1", ROOT / "plugins" / "y"], 2, "is plugins/x"),
    (["null_", "--interface", "strata.offload/1", ROOT / "plugins"], 1, "exists already"),
    (["x", "--interface", "strata.offload/1", "/proc/nowhere/x"], 1, "/proc/nowhere")])
def test_new_plugin_refuses(tmp_path, arguments, code, text):
    assert text in make(*arguments, code=code, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_inside_the_tree_is_one_call_for_cmake(tmp_path):
    """In a copy of what the script reads, so that a failing test leaves nothing in the tree."""
    for name in ("tools", "plugins/null"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / ".clang-format", tmp_path)
    run(sys.executable, tmp_path / "tools" / "new_plugin.py", "mine", "--interface", "strata.offload/1",
        tmp_path / "plugins" / "mine")
    lists = (tmp_path / "plugins" / "mine" / "CMakeLists.txt").read_text()
    assert lists == "strata_add_plugin(mine SOURCES mine.c mine_offload.c LIBS m)\n"
