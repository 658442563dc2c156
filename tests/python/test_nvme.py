"""State on disk as a user meets it: names of directories under every launcher, and what the log says at the start."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest

from host_library import BUILD, ROOT

import strata

PROGRAM = """
import os, sys
import strata
with strata.Engine(text=sys.argv[2], overrides=['log_level="warn"']):
    print(*(name for name in os.listdir(sys.argv[1]) if f"-{os.getpid()}-" in name))
"""
LAUNCHERS = {
    "STRATA": lambda rank, world: {"STRATA_RANK": str(rank), "STRATA_WORLD_SIZE": str(world), "STRATA_JOB": "mine"},
    "torchrun": lambda rank, world: {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
                                     "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "run",
                                     "MASTER_PORT": "29501"},
    "Open MPI": lambda rank, world: {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world),
                                     "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(world),
                                     "PMIX_NAMESPACE": "prterun-host-7@1"},
    "Slurm": lambda rank, world: {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(world), "SLURM_LOCALID": str(rank),
                                  "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}}
NAMES = {"STRATA": "mine", "torchrun": "run.29501", "Open MPI": "prterun-host-7_1", "Slurm": "12.3"}


@pytest.fixture
def disk():
    """In the build tree: temporary directories may lie in RAM."""
    with tempfile.TemporaryDirectory(dir=BUILD) as path:
        yield pathlib.Path(path)
        assert not list(pathlib.Path(path).iterdir())


def manifest(disk, more=""):
    return (f'train_micro_batch_size_per_gpu = 1\n[zero_optimization.offload_optimizer]\ndevice = "nvme"\n'
            f'nvme_path = "{disk}"\n{more}[plugin.offload_nvme]\nprobe_ms = 0\n')


def directories(disk, places):
    """The name of the directory of each rank, and its process."""
    clean = {key: value for key, value in os.environ.items()
             if key == "STRATA_LIBRARY" or not key.startswith(("STRATA_", "OMPI_", "PMIX", "SLURM", "RANK", "WORLD_"))}
    clean["PYTHONPATH"] = os.pathsep.join(sys.path)
    ranks = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(disk), manifest(disk)], env=clean | place,
                              stdout=subprocess.PIPE, text=True) for place in places]
    try:
        return [(rank.communicate(timeout=60)[0].strip(), rank.pid) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_directories_have_the_job_s_name_on_every_rank(disk, launcher):
    found = directories(disk, [LAUNCHERS[launcher](rank, 2) for rank in range(2)])
    assert [name for name, _ in found] == [f"strata-{NAMES[launcher]}-r{rank}-{pid}-0"
                                           for rank, (_, pid) in enumerate(found)]


def test_a_single_rank_s_job_is_its_process(disk):
    (name, pid), = directories(disk, [{}])
    assert name == f"strata-local.{pid}-r0-{pid}-0"


def test_threads_and_hosts_name_their_own(disk):
    def ranks_directory(rank):
        with strata.Engine(text=manifest(disk), overrides=['log_level="warn"'], thread_rank=rank):
            return [entry.name for entry in disk.iterdir() if f"-r{rank.rank}-" in entry.name]

    found = strata.run_threads(2, ranks_directory)
    shared = {re.fullmatch(r"strata-(.+)-r\d-\d+-0", name).group(1) for names in found for name in names}
    assert len(found) == 2 and len(shared) == 1, found


# ---- what the log says at the start ----------------------------------------------------------------------------------


def start_log(disk, settings="", options="", params=""):
    """Of a model of two units with 262144 params each."""
    text = ("train_micro_batch_size_per_gpu = 1\n[zero_optimization]\nstage = 3\nparam_persistence_threshold = 0\n"
            f"{settings}[zero_optimization.offload_optimizer]\ndevice = 'nvme'\nnvme_path = '{disk}'\n{params}"
            f"[plugin.offload_nvme]\nprobe_ms = 0\n{options}")
    lines = []
    with strata.Engine(text=text, log=lambda *line: lines.append(line[-1])) as engine:
        for name in ("a", "b"):
            engine.unit(name).param(name, (512, 512), dtype="bf16")
        engine.commit()
    return lines


def row(lines, what):
    found = [line for line in lines if re.match(f"plan: [a-z]+: {what} ", line)]
    assert len(found) == 1, lines
    return found[0].partition("; ")[2]


@pytest.mark.parametrize("settings, asked, note", [
    ("", "buffer_size = 131072\n", "4 of 131072 elements, buffer_size 131072"),
    ("", "buffer_size = 5000\n", "4 of 4096 elements, buffer_size 5000: in steps of 2048"),
    ("", "buffer_size = 300000\nbuffer_count = 5\n",
     "5 of 262144 elements, buffer_size 300000: no part of a unit is larger"),
    ("", "", "4 of 262144 elements, the default buffer_size 4194304: no part of a unit is larger"),
    ("", "buffer_size = 4194304\n", "4 of 262144 elements, buffer_size 4194304: no part of a unit is larger"),
    ("sub_group_size = 100000\n", "", "4 of 98304 elements, the default buffer_size 4194304: sub_group_size is 100000"),
    ("sub_group_size = 100000\n", "buffer_size = 50000\n", "4 of 49152 elements, buffer_size 50000: in steps of 2048"),
])
def test_update_buffers_say_why_they_are_not_as_asked(disk, settings, asked, note):
    assert row(start_log(disk, settings, params=asked), "update buffers") == note


@pytest.mark.parametrize("asked, note", [
    ("buffer_size = 131072\n", "5 of 131072 elements, buffer_size 131072"),
    ("buffer_size = 5000\n", "5 of 4096 elements, buffer_size 5000: in steps of 2048"),
    ("", "5 of 262144 elements, the default buffer_size 8388608: no shard is larger"),
])
def test_buffers_of_params_say_why_they_are_not_as_asked(disk, asked, note):
    param = f"[zero_optimization.offload_param]\ndevice = 'nvme'\nnvme_path = '{disk}'\nmax_in_cpu = 0\n{asked}"
    assert row(start_log(disk, params=param), "weight shard buffers") == note


def test_what_budgets_came_to(disk):
    state = 12 * 2 * 512 * 512
    for budget, part in ((state, "100.0"), (state // 4, "25.0")):
        lines = start_log(disk, params=f"cpu_state_budget = {budget}\n")
        states = [line for line in lines if line.startswith("plan: cpu: optimizer state ")]
        assert len(states) == 1
        assert states[0].endswith(f"; {part} % of it, by cpu_state_budget = {budget}")
    param = f"[zero_optimization.offload_param]\ndevice = 'nvme'\nnvme_path = '{disk}'\nmax_in_cpu = 270000\n"
    lines = start_log(disk, params=param)
    shards = [line.partition("; ")[2] for line in lines if ": weight shards " in line]
    assert sorted(shards) == ["", "50.0 % of it, by max_in_cpu = 270000"]
    lines = start_log(disk, params=param.replace("max_in_cpu = 270000", ""))
    assert [line.partition("; ")[2] for line in lines if ": weight shards " in line] == [
        "100.0 % of it, by max_in_cpu = 1000000000, the default"]
    assert not any(" of it, by" in line for line in start_log(disk))


@pytest.mark.parametrize("options, fast_init, said", [
    ("", "", "checksum false: damaged bytes are not noticed; fast_init false: zeros at the start"),
    ("checksum = true\n", "fast_init = true\n",
     "checksum true: each block is compared after it is read; fast_init true: no zeros at the start"),
    ("budget_bytes = 50000000\n", "", "a rank may use 50000000 bytes (budget_bytes); checksum false"),
])
def test_options_that_cost_or_protect_are_said(disk, options, fast_init, said):
    assert sum(said in line for line in start_log(disk, options=options, params=fast_init)) == 1


def test_the_example_needs_less_memory_than_that_of_the_cpu(tmp_path, disk):
    """Of the sample, on two ranks: with buffers of the default size it would not."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 500)
    paths = [f'zero_optimization.{part}.nvme_path="{disk}"' for part in ("offload_optimizer", "offload_param")]

    def planned(manifest, overrides):
        command = [str(BUILD / "bin" / "gpt"), "train", "--text", str(text), "--steps", "1", "--manifest",
                   str(ROOT / "examples" / "manifests" / manifest)]
        command += [word for setting in overrides for word in ("--set", setting)]
        ranks = [subprocess.Popen(command, env=os.environ | LAUNCHERS["STRATA"](rank, 2) | {
            "STRATA_JOB": f"example-{os.getpid()}"}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            for rank in range(2)]
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks), said
        found = re.findall(r"plan: (?:device|cpu): in all .*\((\d+) bytes\)", said[0] + said[1])
        assert len(found) == 2
        return sum(map(int, found))

    cpu = planned("zero3_cpu.toml", [])
    assert planned("zero3_nvme.toml", paths) < 0.6 * cpu
