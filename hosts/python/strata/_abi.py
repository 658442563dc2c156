"""abi/strata/strata.h for ctypes, one to one: constants, structs and prototypes, in the header's order.

Nothing here decides anything. A change of the header is a change of this file and of no other; tests/python/test_abi.py
compares sizes, offsets, names and constants with what a C compiler makes of the header.

Lifetimes: ctypes keeps what is assigned to a pointer field alive only as long as the struct object itself, so callers
hold their argument structs until the call returns, and what the header marks longer than [call] for longer.
"""
from ctypes import (CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p,
                    sizeof)

STATUS = {"OK": 0, "CANCELLED": 1, "UNKNOWN": 2, "INVALID_ARGUMENT": 3, "DEADLINE_EXCEEDED": 4, "NOT_FOUND": 5,
          "ALREADY_EXISTS": 6, "PERMISSION_DENIED": 7, "RESOURCE_EXHAUSTED": 8, "FAILED_PRECONDITION": 9,
          "ABORTED": 10, "OUT_OF_RANGE": 11, "UNIMPLEMENTED": 12, "INTERNAL": 13, "UNAVAILABLE": 14, "DATA_LOSS": 15,
          "UNAUTHENTICATED": 16, "AGAIN": 17}
F32, BF16, F16 = 1, 2, 3
CPU, CUDA = 1, 2
LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR, LOG_HOST_MISBEHAVING, LOG_PLUGIN_MISBEHAVING = range(1, 7)
PARAM_FROZEN, PARAM_TENSOR_MODEL_PARALLEL, PARAM_SHARED = 1, 2, 4
COUNT_TOTAL, COUNT_LAST_STEP = 0, 1

LogFn = CFUNCTYPE(None, c_void_p, c_int32, c_char_p, c_char_p)


class Struct(Structure):
    """STRATA_INIT: zeroed, struct_size set; fields by keyword."""

    def __init__(self, **fields):
        super().__init__(struct_size=sizeof(type(self)), **fields)


HEAD = [("struct_size", c_uint32), ("abi_minor", c_uint32)]


class strata_tensor(Struct):
    _fields_ = HEAD + [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("dtype", c_int32),
                       ("ndim", c_int32), ("shape", POINTER(c_int64))]


class strata_stream(Struct):
    _fields_ = HEAD + [("domain", c_int32), ("device_id", c_int32), ("native", c_void_p)]


LendFn = CFUNCTYPE(c_void_p, c_void_p, c_uint64, POINTER(strata_stream))
TakeBackFn = CFUNCTYPE(None, c_void_p, c_void_p, POINTER(strata_stream))


class strata_lender(Struct):
    _fields_ = HEAD + [("ctx", c_void_p), ("lend", LendFn), ("take_back", TakeBackFn)]


class strata_engine_args(Struct):
    _fields_ = HEAD + [("manifest", c_char_p), ("manifest_text", c_char_p), ("overrides", POINTER(c_char_p)),
                       ("override_count", c_uint64), ("plugin_dir", c_char_p), ("log", LogFn), ("log_ctx", c_void_p),
                       ("job", c_char_p), ("threads", c_uint32), ("rank", c_int32), ("world", c_int32),
                       ("reserved", c_int32), ("gradient_memory", POINTER(strata_lender))]


class strata_ranks(Struct):
    _fields_ = HEAD + [(name, c_int32) for name in (
        "rank", "world", "data_parallel_rank", "data_parallel_size", "tensor_model_parallel_rank",
        "tensor_model_parallel_size", "pipeline_model_parallel_rank", "pipeline_model_parallel_size")]


class strata_group_args(Struct):
    _fields_ = HEAD + [("lr", c_double), ("beta1", c_double), ("beta2", c_double), ("eps", c_double),
                       ("weight_decay", c_double)]


class strata_param_args(Struct):
    _fields_ = HEAD + [("name", c_char_p), ("shape", POINTER(c_int64)), ("ndim", c_int32), ("dtype", c_int32),
                       ("group", c_uint32), ("flags", c_uint32), ("tied", c_uint32), ("tied_to", c_uint32)]


class strata_step_args(Struct):
    _fields_ = HEAD + [("lr", c_double), ("group_lr", POINTER(c_double)), ("group_count", c_uint64),
                       ("max_norm", c_double), ("loss", c_double), ("tokens", c_uint64), ("note", c_char_p),
                       ("groups", POINTER(strata_group_args))]


class strata_step_info(Struct):
    _fields_ = HEAD + [("steps", c_uint64), ("applied_steps", c_uint64), ("skipped_steps", c_uint64),
                       ("grad_norm", c_double), ("clip_factor", c_double), ("was_applied", c_uint32),
                       ("reserved", c_uint32)]


class strata_counters(Struct):
    _fields_ = HEAD + [("gather_bytes", c_uint64), ("gather_calls", c_uint64), ("reduce_bytes", c_uint64),
                       ("reduce_calls", c_uint64), ("agree_bytes", c_uint64), ("tier_read", c_uint64 * 3),
                       ("tier_write", c_uint64 * 3), ("grad_bytes", c_uint64), ("updated_elements", c_uint64),
                       ("fetches", c_uint64), ("prefetch_hits", c_uint64), ("prefetch_dropped", c_uint64)]


class strata_plan_item(Struct):
    _fields_ = HEAD + [("what", c_char_p), ("tier", c_int32), ("reserved", c_uint32), ("bytes", c_uint64)]


class strata_device_info(Struct):
    _fields_ = HEAD + [("type", c_int32), ("device_id", c_int32), ("total_bytes", c_uint64), ("free_bytes", c_uint64),
                       ("held_bytes", c_uint64)]


Engine = c_void_p
Status = c_int32
Unit = Param = Group = c_uint32

# name: (result, arguments)
PROTOTYPES = {
    "strata_init_struct": (None, [c_void_p, c_uint32]),
    "strata_last_error": (c_char_p, []),
    "strata_status_name": (c_char_p, [Status]),
    "strata_version": (c_char_p, []),
    "strata_open": (Status, [POINTER(strata_engine_args), POINTER(Engine)]),
    "strata_close": (None, [Engine]),
    "strata_fail": (Status, [Engine, c_char_p]),
    "strata_rank": (c_int32, [Engine]),
    "strata_world": (c_int32, [Engine]),
    "strata_get_ranks": (Status, [Engine, POINTER(strata_ranks)]),
    "strata_add_group": (Status, [Engine, POINTER(strata_group_args), POINTER(Group)]),
    "strata_add_unit": (Status, [Engine, c_char_p, POINTER(Unit)]),
    "strata_add_param": (Status, [Engine, Unit, POINTER(strata_param_args), POINTER(Param)]),
    "strata_commit": (Status, [Engine]),
    "strata_write_param": (Status, [Engine, Param, POINTER(strata_tensor), c_int32]),
    "strata_read_param": (Status, [Engine, Param, c_char_p, POINTER(strata_tensor)]),
    "strata_fetch": (Status, [Engine, Unit, POINTER(strata_stream)]),
    "strata_release": (Status, [Engine, Unit, POINTER(strata_stream)]),
    "strata_param_view": (Status, [Engine, Param, POINTER(strata_tensor)]),
    "strata_unit_views": (Status, [Engine, Unit, POINTER(strata_tensor), c_uint64, POINTER(c_uint64)]),
    "strata_grad": (Status, [Engine, Param, POINTER(strata_tensor), POINTER(strata_stream)]),
    "strata_grads": (Status, [Engine, POINTER(Param), POINTER(strata_tensor), c_uint64, POINTER(strata_stream)]),
    "strata_grads_done": (Status, [Engine, Unit]),
    "strata_end_backward": (Status, [Engine]),
    "strata_drop_gradients": (Status, [Engine]),
    "strata_step": (Status, [Engine, POINTER(strata_step_args)]),
    "strata_wait": (Status, [Engine]),
    "strata_get_step_info": (Status, [Engine, POINTER(strata_step_info)]),
    "strata_get_counters": (Status, [Engine, c_int32, POINTER(strata_counters)]),
    "strata_get_plan": (Status, [Engine, POINTER(strata_plan_item), c_uint64, POINTER(c_uint64)]),
    "strata_get_device": (Status, [Engine, POINTER(strata_device_info)]),
    "strata_get_setting": (Status, [Engine, c_char_p, POINTER(c_char_p)]),
    "strata_get_plugin_interface": (Status, [Engine, c_char_p, c_char_p, POINTER(c_void_p)]),
    "strata_save": (Status, [Engine, c_char_p, c_char_p]),
    "strata_load": (Status, [Engine, c_char_p, c_char_p]),
    "strata_export_weights": (Status, [Engine, c_char_p]),
    "strata_set_meta": (Status, [Engine, c_char_p, c_char_p]),
    "strata_get_meta": (Status, [Engine, c_char_p, POINTER(c_char_p)]),
}
