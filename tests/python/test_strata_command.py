"""The `strata` command: exit codes (0 well, 1 manifest or plugin wrong, 2 usage), and that it says what a run would."""
import os
import re
import shutil
import subprocess

import pytest

from host_library import BUILD, ROOT
import strata

COMMAND = BUILD / "bin" / "strata"
PLUGINS = BUILD / "lib" / "plugins"
GOOD = ROOT / "examples" / "manifests" / "zero3_cpu.toml"
BATCH = "train_micro_batch_size_per_gpu = 1\n"


def run(*arguments, **environment):
    env = {key: value for key, value in os.environ.items() if not key.startswith("STRATA_")}
    result = subprocess.run([str(COMMAND), *map(str, arguments)], env=env | environment, capture_output=True, text=True,
                            timeout=60)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
def manifest(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path
    return write


@pytest.fixture
def folder(tmp_path):
    """A copy of two plugins in a search folder of its own."""
    for name in ("null", "offload_cpu"):
        for ending in ("so", "toml"):
            shutil.copy(PLUGINS / f"{name}.{ending}", tmp_path)
    return tmp_path


@pytest.mark.parametrize("arguments", [
    [], ["chekc"], ["check"], ["check", GOOD, "--wrold", "2"], ["check", GOOD, "--world", "0"],
    ["check", GOOD, "--world", "two"], ["check", GOOD, "--world", str(2**31)],
    ["check", GOOD, "--set"], ["check", GOOD, "--set", "no_assignment"],
    ["keys", "--html"], ["keys", "more"], ["plugins", "a", "b"], ["version", "x"]])
def test_usage_errors_are_2(arguments):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and err != ""


@pytest.mark.parametrize("typed, answer", [
    ("chek", 'there is no command "chek"; did you mean "check"?'), ("plugin", 'did you mean "plugins"?'),
    ("train", "there are: check, keys, plugins, bench, version")])
def test_an_unknown_command_names_the_nearest(typed, answer):
    code, out, err = run(typed, GOOD)
    assert code == 2 and out == "" and answer in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize("arguments, text", [
    (["--help"], "check"), (["check", "--help"], "--world"), (["version"], "."), (["keys"], "stage = "),
    (["--version"], "."),
    (["keys", "--markdown"], "# Keys of a training manifest"), (["plugins"], "offload_cpu"),
    (["check", GOOD], "no errors")])
def test_what_is_well_is_0(arguments, text):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "") and text in out


def test_lost_output_is_1():
    with open("/dev/full", "w", encoding="ascii") as full:
        lost = subprocess.run([str(COMMAND), "keys"], stdout=full, stderr=subprocess.DEVNULL, check=False)
    assert lost.returncode == 1


# ---- check ---------------------------------------------------------------------------------------------------------

def test_check_names_every_role_and_the_world():
    code, out, _ = run("check", GOOD, "--world", "3")
    assert code == 0
    assert "world 3: train_batch_size 12 = 4 per rank x 1 accumulated x 3 ranks" in out
    for role, plugin in (("collective", "comm_local"), ("device", "device_host"), ("offload_cpu", "offload_cpu"),
                         ("optimizer", "optim_adamw")):
        assert re.search(rf"^  {role} +{plugin} [\d.]+, .*/{plugin}\.so$", out, flags=re.M), out
    assert re.search(r"^  offload_nvme +not used", out, flags=re.M)


# The manifest, and what check must say of it. strata_open refuses each too, in the same words.
WRONG = {
    "a key": ("stage = 3\n" + BATCH, "unknown key"),
    "no batch": ("", "batch sizes: give"),
    "absent and needed": (BATCH + "[plugins]\ndevice = 'nowhere'\n", "plugin nowhere was not found; tried:"),
    "absent tier": (BATCH + "[zero_optimization.offload_optimizer]\ndevice = 'nvme'\nnvme_path = '/tmp'\n"
                    "[plugins]\noffload_nvme = 'nowhere'\n", "plugin nowhere was not found; tried:"),
    "another interface": (BATCH + "[plugins]\noptimizer = 'comm_local'\n",
                          "provides strata.collective/1, strata.optimizer/1 is needed"),
    "an option": (BATCH + "[plugin.comm_local]\nisaa = 'scalar'\n", "did you mean `plugin.comm_local.isa`"),
    "an option's type": (BATCH + "[plugin.comm_local]\nisa = 3\n", "must be text, got 3"),
    "an unused section": (BATCH + "[plugin.offload_cpu]\nbudget_bytes = 1\n", "[plugin.offload_cpu] has no effect"),
    "said twice": (BATCH + "[optimizer.params]\nstate_layout = 'split'\n[plugin.optim_adamw]\nlayout = 'split'\n",
                   "say the same thing"),
    "an idle tier's plugin": (BATCH + "[plugins]\noffload_cpu = 'null'\n",
                              "run.toml:3:1: `plugins.offload_cpu` has no effect"),
    "a search folder": (BATCH + "[plugins]\npath = ['nowhere']\n", "run.toml:3:1: `plugins.path`: "),
    "a path": (BATCH + "[plugins]\noptimizer = './mine'\n", "run.toml:3:1: `plugins.optimizer`: plugin ./mine was not"),
    "no taker": (BATCH + "[optimizer.params]\nstate_layout = 'split'\n[plugins]\noptimizer = 'null'\n",
                 "state_layout has no effect"),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_says_what_a_run_would(manifest, name):
    text, expected = WRONG[name]
    path = manifest(text)
    code, out, err = run("check", path)
    assert code == 1 and expected in err and "no errors" not in out, err
    with pytest.raises(strata.StrataError) as refused:
        strata.Engine(path)
    assert expected in str(refused.value)


def test_check_reports_all_errors_at_once(manifest):
    code, _, err = run("check", manifest("[plugins]\ndevice = 'nowhere'\n[plugin.comm_local]\nisaa = 'x'\n"))
    assert code == 1
    for text in ("plugin nowhere", "plugin.comm_local.isaa", "batch sizes"):
        assert err.count(text) == 1, err


@pytest.mark.parametrize("first", ["stag = 3\n", "zero_optimization.stage = 9\n", "plugins.path = ['nowhere']\n"])
def test_an_error_hides_none_of_a_later_check(manifest, first):
    """Nor does the last line leave open what became of it."""
    path = manifest(first + "plugins.device = './nobody'\nplugins.optimizer = 'comm_local'\ntrain_batch_size = 8\n"
                    "[plugin.comm_local]\nisaa = 'x'\n[plugin.offload_cpu]\nbudget_byte = 1\n")
    code, out, err = run("check", path, "--world", "3")
    assert code == 1 and "no errors" not in out
    for text in (f"{path}:1:", f"{path}:2:9: `plugins.device`: plugin ./nobody", f"{path}:3:9: `plugins.optimizer`",
                 "plugin.comm_local.isaa", "`plugin.offload_cpu.budget_byte`;", "with --world 3"):
        assert err.count(text) == 1, err
    assert re.search(r"checkpoint +checkpoint [\d.]+, ", out), out
    assert err.splitlines()[-1] == f"{path}: refused: strata_open would fail on these errors"


def test_an_error_brings_no_others_along(manifest):
    """A batch size that could not be read is no missing one, and what may follow from an error is not reported."""
    code, _, err = run("check", manifest("train_batch_size = 'x'\n[plugin.offload_cpu]\nbudget_bytes = 1\n"))
    assert code == 1 and len(err.splitlines()) == 2, err
    path = manifest("this is no TOML")
    code, out, err = run("check", path)
    assert code == 1 and out == ""
    assert err.splitlines()[-1].endswith("on these errors; nothing else could be checked")


def test_check_fits_the_batch_to_the_world(manifest):
    path = manifest("train_batch_size = 8\ntrain_micro_batch_size_per_gpu = 2\ngradient_accumulation_steps = 2\n")
    assert run("check", path, "--world", "2")[0] == 0
    code, _, err = run("check", path)
    assert code == 1 and "with --world 1" in err and "must be exactly 4" in err


def test_check_cuts_the_world_into_models(manifest):
    path = manifest("train_micro_batch_size_per_gpu = 2\ntensor_model_parallel_size = 2\n"
                    "pipeline_model_parallel_size = 3\n")
    assert "world 6: train_batch_size 2 = 2 per rank x 1 accumulated x 1 data-parallel rank" in run("check", path)[1]
    assert "train_batch_size 8 = 2 per rank x 1 accumulated x 4 data-parallel ranks" in run(
        "check", path, "--world", "24")[1]
    code, _, err = run("check", path, "--world", "8")
    assert code == 1 and "world of 8 ranks" in err and "tensor_model_parallel_size = 2 x" in err


def test_check_takes_overrides():
    settings = ["--set", "train_micro_batch_size_per_gpu=5", "--set", "gradient_accumulation_steps=3"]
    for arguments in ([GOOD, *settings], [*settings, GOOD]):
        assert "train_batch_size 15 = 5 per rank x 3 accumulated" in run("check", *arguments)[1]
    code, _, err = run("check", GOOD, "--set", "zero_optimization.stag=2")
    assert code == 1 and "override zero_optimization.stag=2: unknown key" in err


def test_sections_may_belong_to_what_a_plugin_opens_itself(folder, manifest):
    """fault opens the plugin it wraps, which has no role of its own; [requires] says that it may."""
    text = BATCH + f"""[plugins]
path = ['{folder}']
offload_cpu = 'fault'
[plugin.fault]
wraps = 'offload_cpu'
[plugin.offload_cpu]
budget_bytes = 1000000
[zero_optimization.offload_optimizer]
device = 'cpu'
"""
    shutil.copy(PLUGINS / "fault.so", folder)
    toml = re.sub(r"(?s)\[requires\].*?\n\n", "", (PLUGINS / "fault.toml").read_text())
    (folder / "fault.toml").write_text(toml)
    code, _, err = run("check", manifest(text))
    assert code == 1 and "[plugin.offload_cpu] has no effect" in err
    (folder / "fault.toml").write_text(toml + '\n[requires]\nhost = ["strata.host.plugins/1"]\n')
    assert run("check", manifest(text))[0] == 0


SHARE = "zero_optimization.offload_optimizer."


@pytest.mark.parametrize("key, value", [("ratio", "0.5"), ("split_update", "true"), ("device_state_budget", "1000")])
def test_check_knows_that_device_host_has_no_part_in_the_update(manifest, key, value):
    """In the words of strata_open: the key, where it stands, what it does, and which device cannot."""
    path = manifest(BATCH + "[zero_optimization.offload_optimizer]\ndevice = 'cpu'\npin_memory = true\n"
                    f"{key} = {value}\n")
    code, out, err = run("check", path)
    assert code == 1 and "no errors" not in out
    assert f"{path}:5:1: `{SHARE}{key}` = {value} " in err, err
    assert '`plugins.device` = "device_host" (default) has no memory of its own' in err
    with pytest.raises(strata.FailedPrecondition) as refused:
        strata.Engine(path)
    assert err.splitlines()[0] in str(refused.value)
    assert run("check", path, "--set", "plugins.device=null", "--set", "plugins.device_optimizer=null")[0] == 0


@pytest.mark.parametrize("there", ["", "a", "b", "ab"])
def test_check_warns_of_directories_that_nobody_makes(tmp_path, manifest, there):
    """And makes none itself. strata_open refuses to start without them: the same path, by its NOT_FOUND."""
    for name in there:
        (tmp_path / "disks" / name).mkdir(parents=True)
    missing = [name for name in "ab" if name not in there]
    path = manifest(BATCH + "[zero_optimization.offload_optimizer]\ndevice = 'nvme'\nnvme_path = 'disks/a, disks/b'\n"
                    "[plugin.offload_nvme]\nprobe_ms = 0\n")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("check", path)
    assert (code, err) == (0, "") and "no errors" in out
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(missing)
    for name, warning in zip(missing, warnings):
        assert warning.startswith(
            f"warning: {path}:4:1: `{SHARE}nvme_path`: {tmp_path}/disks/{name}: no such directory")
    assert sorted(tmp_path.rglob("*")) == before
    if missing:
        with pytest.raises(strata.NotFound, match=re.escape(f"{tmp_path}/disks/{missing[0]}")):
            strata.Engine(path)


@pytest.mark.parametrize("trace, missing", [("trace", None), ("no/trace", "no: no such directory"),
                                            ("run.toml/trace", "run.toml: is no directory")])
def test_check_warns_where_a_trace_cannot_be_made(tmp_path, manifest, trace, missing):
    path = manifest(BATCH + f"[trace]\npath = '{trace}'\n")
    code, out, _ = run("check", path)
    assert code == 0 and out.count("warning: ") == (missing is not None)
    assert list(tmp_path.iterdir()) == [path]
    if missing:
        assert f"warning: {path}:3:1: `trace.path`: {tmp_path}/{missing}" in out, out
        with pytest.raises(strata.NotFound, match=missing):
            strata.Engine(path)


def test_check_without_a_checkpoint_plugin_can_start(manifest):
    code, out, _ = run("check", manifest(BATCH + "[plugins]\ncheckpoint = 'nowhere'\n"))
    assert code == 0 and re.search(r"checkpoint +nowhere is not there: this run can start", out)


@pytest.mark.parametrize("damage, text", [
    (lambda f: (f / "null.so").write_bytes((f / "null.so").read_bytes()[:5000]), "is truncated"),
    (lambda f: (f / "null.so").unlink(), "no such file"),
    (lambda f: (f / "null.toml").write_text((f / "null.toml").read_text().replace("major = 1", "major = 2")),
     "ABI major 2"),
    (lambda f: (f / "null.toml").write_text((f / "null.toml").read_text().replace('"0.1.0"', '"9.9.9"')),
     "different builds")])
def test_a_broken_plugin_is_1_for_check_and_for_plugins(folder, manifest, damage, text):
    damage(folder)
    path = manifest(BATCH + f"[plugins]\ncheckpoint = 'null'\npath = ['{folder}']\n")
    code, _, err = run("check", path)
    assert code == 1 and text in err
    code, out, _ = run("plugins", path)
    assert code == 1 and re.search(rf"^null  broken\n  {folder}/null\.toml\n  .*{text}", out, flags=re.M), out
    assert re.search(r"^offload_cpu [\d.]+  strata.offload/1\n", out, flags=re.M), "the others are listed all the same"


# ---- plugins -------------------------------------------------------------------------------------------------------

def test_plugins_are_sorted_with_paths_and_options(folder):
    code, out, _ = run("plugins", STRATA_PLUGIN_PATH=f"{folder}:relative:/nowhere")
    assert code == 0
    ids = re.findall(r"^(\w+) [\d.]+  strata\.", out, flags=re.M)
    assert ids == sorted(ids) and ids.count("null") == 2
    assert f"  {folder}/null.so\n" in out
    assert f"  {PLUGINS.resolve()}/null.so\n  hidden by {folder}/null.toml\n" in out
    assert "note: STRATA_PLUGIN_PATH entry relative: not searched" in out
    assert "note: /nowhere: No such file or directory" in out
    assert "option" not in out
    verbose = run("plugins", "-v")[1]
    assert "  option budget_bytes (int, default 0): Bytes that all regions" in verbose
    assert '  option isa (string, default "auto"): ' in verbose


def test_a_plugin_that_was_not_built_is_listed_with_the_reason(folder, manifest):
    (folder / "device_gone.absent").write_text("there was no compiler for it\n")
    code, out, _ = run("plugins", STRATA_PLUGIN_PATH=str(folder))
    assert code == 0 and "device_gone  not built\n  there was no compiler for it\n" in out
    (folder / "null.absent").write_text("of an earlier build\n")
    assert "of an earlier build" not in run("plugins", STRATA_PLUGIN_PATH=str(folder))[1]
    code, _, err = run("check", manifest(BATCH + "[plugins]\ndevice = 'device_gone'\n"), STRATA_PLUGIN_PATH=str(folder))
    assert code == 1 and "the plugin was not built: there was no compiler for it" in err
    assert "did you mean" not in err


def test_more_than_one_exported_symbol_is_a_warning(folder):
    source = folder / "loud.c"
    source.write_text("#include \"strata/plugin.h\"\n"
                      "int one, two, three; void four(void) {}\n"
                      "static const void *get(const char *id) { (void)id; return 0; }\n"
                      "static const strata_plugin d = {sizeof d, 0, \"loud\", \"1.0.0\", get};\n"
                      "const strata_plugin *strata_plugin_entry_v1(uint32_t m) { (void)m; return &d; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{ROOT / 'abi'}", source, "-o", folder / "loud.so"], check=True)
    (folder / "loud.toml").write_text((folder / "null.toml").read_text().replace("null", "loud").replace(
        '"0.1.0"', '"1.0.0"').replace('"strata.device/1", ', ""))
    (folder / "loud.toml").write_text(re.sub(r"interfaces = .*", "interfaces = []", (folder / "loud.toml").read_text()))
    code, out, _ = run("plugins", STRATA_PLUGIN_PATH=str(folder))
    assert code == 0
    assert re.search(r"loud\.so\n  warning: exports 4 names beside strata_plugin_entry_v1:( \w+){3} \.\.\.\n", out), out
    assert out.count("warning") == 1


def test_json_is_told_where_it_goes():
    code, _, err = run("check", ROOT / "examples" / "manifests" / "ds_zero3_cpu.json")
    assert code != 0 and "ds_zero3_cpu.json:1:1: " in err and "strata.deepspeed.initialize" in err
