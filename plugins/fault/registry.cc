#include "registry.h"

namespace strata::fault {

Registry& Registry::instance() {
  // Never destroyed: an instance that is closed at exit still counts.
  static Registry* const registry = new Registry;
  return *registry;
}

void Registry::set_gate(const std::string& name, bool open) {
  std::lock_guard lock(mutex_);
  gates_[name].open = open;
  changed_.notify_all();
}

uint64_t Registry::waiting(const std::string& name) {
  std::lock_guard lock(mutex_);
  return gates_[name].waiting;
}

Waited Registry::wait_gate(const std::string& name, std::chrono::steady_clock::time_point until,
                           const std::atomic<bool>& cancelled) {
  std::unique_lock lock(mutex_);
  Gate& gate = gates_[name];
  ++gate.waiting;
  const bool ended = changed_.wait_until(lock, until, [&] { return gate.open || cancelled; });
  --gate.waiting;
  if (gate.open) return Waited::kPassed;
  return ended ? Waited::kCancelled : Waited::kTimedOut;
}

Waited Registry::pause(std::chrono::steady_clock::time_point until, const std::atomic<bool>& cancelled) {
  std::unique_lock lock(mutex_);
  const bool ended = changed_.wait_until(lock, until, [&] { return cancelled.load(); });
  return ended ? Waited::kCancelled : Waited::kPassed;
}

void Registry::wake() {
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

Counter& Registry::counter(const std::string& tag, int32_t rank, const std::string& interface, const std::string& op) {
  std::lock_guard lock(mutex_);
  return counters_[{tag, rank, interface, op}];
}

uint64_t Registry::sum(const std::string& tag, int32_t rank, const std::string& op,
                       std::atomic<uint64_t> Counter::*which) {
  const size_t dot = op.find('.');
  const std::string wanted_interface = dot == std::string::npos ? "" : op.substr(0, dot);
  const std::string wanted_op = dot == std::string::npos ? op : op.substr(dot + 1);
  uint64_t total = 0;
  std::lock_guard lock(mutex_);
  for (const auto& [key, counter] : counters_) {
    const auto& [its_tag, its_rank, its_interface, its_op] = key;
    const bool matches = its_tag == tag && its_op == wanted_op && (rank == -1 || its_rank == rank) &&
                         (wanted_interface.empty() || its_interface == wanted_interface);
    if (matches) total += (counter.*which).load();
  }
  return total;
}

namespace {

void STRATA_CALL open_gate(const char* name) { Registry::instance().set_gate(name, true); }
void STRATA_CALL close_gate(const char* name) { Registry::instance().set_gate(name, false); }
uint64_t STRATA_CALL waiting(const char* name) { return Registry::instance().waiting(name); }
uint64_t STRATA_CALL count(const char* tag, int32_t rank, const char* op) {
  return Registry::instance().sum(tag, rank, op, &Counter::calls);
}
uint64_t STRATA_CALL bytes_seen(const char* tag, int32_t rank, const char* op) {
  return Registry::instance().sum(tag, rank, op, &Counter::bytes);
}

}  // namespace

const strata_fault_control_api control_table = {
    sizeof(strata_fault_control_api), STRATA_ABI_MINOR, open_gate, close_gate, waiting, count, bytes_seen};

}  // namespace strata::fault
