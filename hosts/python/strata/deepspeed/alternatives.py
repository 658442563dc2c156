"""What DeepSpeed has and this package has not, with the way to do it: for the AttributeError that says so."""

OF_MODULE = {
    "DeepSpeedConfig": "read(config) says what becomes of every key",
    "OnDevice": "strata.torch.init() builds a model without memory",
    "PipelineModule": "pipeline_model_parallel_size in the configuration, the schedule is the program's",
    "pipe": "pipeline_model_parallel_size in the configuration, the schedule is the program's",
    "accelerator": "engine.device is the device; torch.cuda has the rest",
    "add_tuning_arguments": "schedulers are torch's: initialize(lr_scheduler=function of the optimizer)",
    "checkpointing": "torch.utils.checkpoint, inside the model",
    "get_accelerator": "engine.device is the device; torch.cuda has the rest",
    "init_inference": "engine.eval() and torch.no_grad() evaluate and generate with the engine's weights",
    "launcher": "torchrun, mpirun or srun start the ranks",
    "log_dist": "Python's logging, on deepspeed.comm.get_rank() == 0",
    "logger": "Python's logging; the engine's lines go to initialize(log=function)",
    "moe": "a mixture-of-experts layer is a unit: initialize(units=[its class])",
    "ops": 'the optimizers are the configuration\'s: optimizer.type is "AdamW" or "Adam"',
    "runtime": "initialize, zero and comm have what is there",
    "tp_model_init": "tensor_model_parallel_size in the configuration, the layers are the program's (Megatron's, say)",
    "utils": "Python's logging; engine.read(param), engine.grad(param) and engine.write(param, value) of engine.strata",
}
OF_ENGINE = {
    "allreduce_gradients": "engine.backward reduces them",
    "clip_fp32_gradients": "gradient_clipping in the configuration, or engine.strata.clip_grad_norm_(x) for one step",
    "consolidated_16bit_state_dict": "engine.strata.state_dict()",
    "cur_scale": "there is no loss scaling: bf16 needs none",
    "deepspeed_io": "keep your own data loader",
    "destroy": "engine.close()",
    "eval_batch": "engine(batch) under torch.no_grad()",
    "get_fp32_state_dict": "engine.strata.read(param, \"master\") for each param",
    "load_module_state_dict": "engine.strata.load_state_dict(values)",
    "loss_scale": "there is no loss scaling: bf16 needs none",
    "module_state_dict": "engine.strata.state_dict()",
    "no_sync": "gradient_accumulation_steps in the configuration says when an update comes",
    "offload_states": "offload_optimizer and offload_param in the configuration say where state lies",
    "reload_states": "offload_optimizer and offload_param in the configuration say where state lies",
    "save_fp16_model": "engine.save_16bit_model(save_dir)",
    "set_gradient_accumulation_boundary": "gradient_accumulation_steps in the configuration says when an update comes",
    "set_train_batch_size": "train_batch_size is fixed by the configuration",
    "train_batch": "call engine(batch), engine.backward(loss) and engine.step()",
    "training_dataloader": "keep your own data loader",
}
OF_ZERO = {
    "register_external_parameter": "units=[the class of the module that reads the param] in initialize",
    "TiledLinear": "unit_size in initialize bounds what is fetched at once",
}


def absent(owner, name, advice, otherwise=""):
    """The AttributeError for `name`; `otherwise` is the advice for names that have none of their own."""
    way = advice.get(name, otherwise)
    return AttributeError(f"{owner} has no {name}" + (f": {way}" if way else ""), name=name)
