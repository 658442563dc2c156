"""For programs written against DeepSpeed: initialize() takes its configuration and returns what DeepSpeed's returns.

    import strata.deepspeed as deepspeed
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config="ds_config.json")
    for batch in batches:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

config.py reads the configuration and says for every key what becomes of it, by the table of keys.py; engine.report
and rank 0's log have the lines. engine.py has the engine's calls, checkpoints.py what travels with checkpoints;
zero.py and comm.py are deepspeed.zero and deepspeed.comm; alternatives.py has the words for what is not there.
"""
import logging

import torch

from ..errors import InvalidArgument
from ..model import SETTINGS
from ..torch import prepare
from . import comm, zero
from .alternatives import OF_MODULE, absent
from .comm import init_distributed
from .config import Refused, hidden_size, log_report, read
from .engine import DeepSpeedEngine, Optimizer

__all__ = ["DeepSpeedEngine", "Optimizer", "Refused", "add_config_arguments", "comm", "init_distributed", "initialize",
           "read", "zero"]
_log = logging.getLogger(__name__)


def add_config_arguments(parser):
    """--deepspeed and --deepspeed_config for an argparse parser, which is returned; initialize(args=...) reads them."""
    group = parser.add_argument_group("DeepSpeed", "Configuration")
    group.add_argument("--deepspeed", action="store_true", help="for the program's own use: initialize ignores it")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration, a JSON file")
    return parser


def initialize(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None,
               config=None, auto=None, config_params=None, dist_init_required=None, mpu=None, collate_fn=None,
               **prepare_options):
    """(engine, optimizer, None, lr_scheduler). Collective.

    config           a dict, or the path of a JSON file; args.deepspeed_config if None
    model_parameters params as torch optimizers take them; groups keep their lr, betas, eps and weight_decay
    lr_scheduler     a function of the optimizer that makes a torch scheduler; engine.step() steps it
    auto             values for keys that are "auto", by path; further options are strata.torch.prepare's

    Trains on a GPU per rank where torch sees GPUs, unless overrides name plugins.device, or ranks are threads.
    Refused names every key that cannot be had. An optimizer object is refused: the configuration names it.
    config_params is config's older name; dist_init_required changes nothing, see init_distributed.
    """
    if optimizer is not None:
        raise InvalidArgument("initialize(optimizer=...): the optimizer is the configuration's, it runs where its "
                              "state lies; leave the argument out")
    if training_data is not None:
        raise InvalidArgument("initialize(training_data=...): no data loader is made; keep your own")
    if collate_fn is not None:
        raise InvalidArgument("initialize(collate_fn=...): no data loader is made; keep your own")
    if mpu is not None:
        raise InvalidArgument("initialize(mpu=...): the groups are those of tensor_model_parallel_size and "
                              "pipeline_model_parallel_size in the configuration; leave the argument out")
    config = config if config is not None else config_params
    config = config if config is not None else getattr(args, "deepspeed_config", None)
    if config is None:
        raise InvalidArgument("initialize needs config, or args.deepspeed_config")
    manifest = read(config, auto, hidden_size(model))
    groups = _groups(model_parameters)
    overrides = [*_placed(manifest, prepare_options), *prepare_options.pop("overrides", [])]
    with manifest.named():
        inner = prepare(model, text=manifest.text, groups=groups, overrides=overrides, **prepare_options)
    if inner.rank == 0:
        log_report(manifest.keys_on(inner.device.type), _log)
        if manifest.get("optimizer.type") is None:
            _log.warning("the configuration names no optimizer: AdamW, with lr = %s, betas = %s, weight_decay = %s",
                         *(inner.core.setting(f"optimizer.params.{name}") for name in ("lr", "betas", "weight_decay")))
    facade = Optimizer(inner)
    zero.adopt(inner)
    scheduler = lr_scheduler(facade) if callable(lr_scheduler) else lr_scheduler
    engine = DeepSpeedEngine(inner, facade, scheduler, manifest, config, prepare_options.get("thread_rank"))
    return engine, facade, None, scheduler


def _placed(manifest, prepare_options):
    chosen = any(override.startswith("plugins.device") for override in prepare_options.get("overrides", []))
    if chosen or prepare_options.get("thread_rank") is not None or not torch.cuda.is_available():
        return []
    return manifest.on_gpus(comm.get_world_size())


def _groups(model_parameters):
    given = list(model_parameters or [])
    if given and isinstance(given[0], dict):
        return [{key: group[key] for key in ("params", *SETTINGS) if key in group} for group in given]
    return None  # all params have the configuration's settings; frozen ones are known by requires_grad


def __getattr__(name):
    raise absent("strata.deepspeed", name, OF_MODULE)
