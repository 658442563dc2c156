"""python -m strata.accelerate launch --config_file FILE [--num_processes N ...] SCRIPT [ARGUMENTS]

Starts the ranks of one machine with torchrun, as the file says, and tells them where it is: strata.accelerate's
Accelerator and strata.transformers' arguments read it. Options given here win over the file's.
"""
import argparse
import os
import pathlib
import sys

from ..errors import InvalidArgument
from . import config


def command(file, options, script):
    """(torchrun's command line, environment to add) of a launch."""
    launch = {**file.launch, **{name: value for name, value in options.items() if value is not None}}
    machines = int(launch.get("num_machines", 1))
    processes = int(launch.get("num_processes", 1))
    if processes % machines:
        raise InvalidArgument(f"num_processes = {processes}: it counts the ranks of all {machines} machines, which "
                              f"must have as many each")
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes // machines)]
    if machines == 1 and launch.get("main_process_port") is None:
        line.append("--standalone")
    else:
        if machines > 1 and not launch.get("main_process_ip"):
            raise InvalidArgument("main_process_ip: several machines need the address of machine 0")
        line += ["--nnodes", str(machines), "--node-rank", str(launch.get("machine_rank", 0)), "--master-addr",
                 str(launch.get("main_process_ip") or "127.0.0.1"), "--master-port",
                 str(launch.get("main_process_port") or 29500)]
    environment = {"ACCELERATE_USE_CPU": "true"} if file.use_cpu else {}
    if str(launch.get("gpu_ids", "all")) != "all":
        environment["CUDA_VISIBLE_DEVICES"] = str(launch["gpu_ids"])
    return line + script, environment


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m strata.accelerate", description=__doc__.split("\n\n")[1],
                                     allow_abbrev=False)
    parser.add_argument("action", choices=["launch"])
    parser.add_argument("--config_file", required=True)
    for name in ("num_processes", "num_machines", "machine_rank", "main_process_port"):
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--main_process_ip")
    parser.add_argument("--gpu_ids")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = vars(parser.parse_args(arguments))
    path = pathlib.Path(given.pop("config_file")).resolve()
    script = [given.pop("script"), *given.pop("arguments")]
    del given["action"]
    try:
        line, environment = command(config.read(path), given, script)
    except InvalidArgument as error:
        sys.exit(str(error))
    os.execve(line[0], line, {**os.environ, **environment, config.ENVIRONMENT: str(path)})


if __name__ == "__main__":
    main(sys.argv[1:])
