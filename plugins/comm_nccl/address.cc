#include "address.h"

#include <cstdlib>

namespace comm_nccl {
namespace {

using strata::plugin_kit::join;

std::string value_of(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

bool is_port(long port) { return port > 0 && port < 65536; }

}  // namespace

Error find_rank0(const strata::rank_env::Identity& id, const strata::plugin_kit::Options& options, Address* out) {
  const std::string address = options.text("address", "");
  const int64_t port = options.integer("port", 0);
  if (port != 0 && !is_port(port)) return {STRATA_INVALID_ARGUMENT, join("option port = ", port, ": 1 to 65535, or 0")};
  if (!address.empty() && port != 0) {
    return {STRATA_INVALID_ARGUMENT, "options address and port are both set: the address has its port"};
  }
  if (!address.empty()) return strata::control_channel::resolve(address, out);
  const bool one_machine = id.machines.empty() && id.local_world == id.world;
  if (one_machine && port == 0) {
    *out = strata::control_channel::local_address("comm_nccl", id.job);
    return {};
  }
  std::string host = value_of("MASTER_ADDR");
  if (host.empty() && one_machine) host = "127.0.0.1";
  const std::string master_port = value_of("MASTER_PORT");
  const long given = std::strtol(master_port.c_str(), nullptr, 10);
  if (host.empty() || (port == 0 && !is_port(given))) {
    return {STRATA_INVALID_ARGUMENT,
            join("ranks on several machines (", id.local_world, " of ", id.world,
                 " here) meet at MASTER_ADDR and MASTER_PORT, which are \"", host, "\" and \"", master_port,
                 "\"; set both on every rank, to rank 0's machine, or option address")};
  }
  const long above = given + kPortsAbove < 65536 ? given + kPortsAbove : given - kPortsAbove;
  return strata::control_channel::resolve(join(host, ":", port != 0 ? port : above), out);
}

Error given_unique_id(const strata::plugin_kit::Options& options, std::optional<ncclUniqueId>* out) {
  std::string text = options.text("unique_id", "");
  if (text.empty()) text = value_of("STRATA_NCCL_UNIQUE_ID");
  if (text.empty()) return {};
  ncclUniqueId id{};
  const bool digits = text.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
  if (text.size() != 2 * sizeof(id.internal) || !digits) {
    return {STRATA_INVALID_ARGUMENT,
            join("the unique id (option unique_id, or STRATA_NCCL_UNIQUE_ID) has ", text.size(),
                 " characters; it must be ", 2 * sizeof(id.internal), " hexadecimal digits")};
  }
  for (size_t k = 0; k < sizeof(id.internal); ++k) {
    id.internal[k] = static_cast<char>(std::strtol(text.substr(2 * k, 2).c_str(), nullptr, 16));
  }
  *out = id;
  return {};
}

}  // namespace comm_nccl
