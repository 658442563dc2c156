#include "env.h"

#include "board.h"

namespace comm_local {

using strata::rank_env::wrong_identity;

Error identify_here(const strata_open_args& args, Identity* out) {
  if (Error e = strata::rank_env::identify(args, out); !e.ok()) return e;
  const std::string one_machine = "comm_local joins the ranks of one machine only";
  if (!out->machines.empty()) return {STRATA_INVALID_ARGUMENT, out->machines + ": " + one_machine};
  if (out->local_world != out->world) return wrong_identity(*out, one_machine + ": local world must be world");
  if (out->world > kMaxRanks) {
    return wrong_identity(*out, "comm_local serves at most " + std::to_string(kMaxRanks) + " ranks");
  }
  return {};
}

}  // namespace comm_local
