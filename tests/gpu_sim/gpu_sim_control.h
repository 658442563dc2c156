/* gpu_sim_control.h - what a test may do to a simulated GPU beyond strata.device/1.
 *
 * A test that has no device of its own (the engine opened it) opens one with the engine's job and local rank: it is the
 * same GPU, and a stream made there may be handed to the engine.
 */
#ifndef STRATA_TESTS_GPU_SIM_CONTROL_H
#define STRATA_TESTS_GPU_SIM_CONTROL_H

#include "strata/iface/device.h"

STRATA_EXTERN_C_BEGIN

#define STRATA_GPU_SIM_CONTROL "strata.gpu_sim.control/1"

typedef struct strata_gpu_sim_control_api {
  uint32_t struct_size;
  uint32_t abi_minor;
  /* Makes `stream` wait until `event` is set; at the deadline of `self` the device fails. [any][open] */
  strata_status(STRATA_CALL* hold)(strata_device* self, const strata_stream* stream, strata_event* event);
} strata_gpu_sim_control_api;

STRATA_EXTERN_C_END
#endif
