// address.h - where rank 0 is to be found, and NCCL's unique id when the host brings one.
#pragma once

#include <nccl.h>

#include <optional>

#include "control_channel/socket.h"
#include "plugin_kit/plugin_kit.h"
#include "rank_env/rank_env.h"

namespace comm_nccl {

using strata::control_channel::Address;
using strata::plugin_kit::Error;

// Option address; or option port; or, for ranks of one machine, the machine's socket named by the job; or MASTER_ADDR
// and kPortsAbove MASTER_PORT, which itself belongs to the launcher's own store.
Error find_rank0(const strata::rank_env::Identity& id, const strata::plugin_kit::Options& options, Address* out);

inline constexpr int kPortsAbove = 1000;

Error given_unique_id(const strata::plugin_kit::Options& options, std::optional<ncclUniqueId>* out);

}  // namespace comm_nccl
