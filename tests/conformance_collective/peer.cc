// peer.cc - one rank and the short forms of its calls; how several ranks are run is in ranks.cc, or for a launcher of
// its own in tests/conformance_mpi.
#include <cstdlib>

#include "ranks.h"

namespace strata::test {

std::ostream& operator<<(std::ostream& out, const Setup& setup) { return out << setup_name(setup); }

std::string setup_name(const Setup& setup) {
  return plugin_id(setup.plugin) + (setup.threads ? "_threads_" : "_processes_") + std::to_string(setup.world);
}

Peer::Peer(const Setup& setup, int rank_number, const std::string& job, unsigned host_threads)
    : api(load<strata_collective_api>(setup.plugin, STRATA_COLLECTIVE)),
      make_mirror([make = setup.mirror, rank_number] { return make ? make(rank_number) : nullptr; }),
      mirror(make_mirror()),
      options(setup.options ? setup.options() : Options()),
      rank(rank_number, setup.world, setup.threads, job),
      host([](strata_log_level, const std::string&, const std::string&) {}, STRATA_LOG_INFO, host_threads) {
  base = rank.args();
  base.host = host.c();
  base.job = rank.job.c_str();
  base.deadline_ns = 20'000'000'000;
}

Status Peer::open(Options* own) {
  strata_open_args a = base;
  a.options = own ? own->c() : options.c();
  return open_with(a);
}

Status Peer::open_with(strata_open_args a) { return take_failure(api->open(&a, &comm)); }

void Peer::close() {
  if (comm) api->close(comm);
  comm = nullptr;
}

void* Peer::alloc(uint64_t bytes) {
  if (mirror) return mirror->alloc(bytes);
  void* out = nullptr;
  if (Status s = take_failure(api->alloc(comm, bytes, &out)); !s.ok()) {
    std::fprintf(stderr, "alloc: %s\n", s.text().c_str());
    std::abort();
  }
  return out;
}

strata_coll_args Peer::args(const std::vector<strata_coll_item>& items, uint64_t tag, const char* label) const {
  strata_coll_args a{};
  a.struct_size = sizeof(a);
  a.items = items.data();
  a.item_count = items.size();
  a.item_stride = sizeof(strata_coll_item);
  a.tag = tag;
  a.label = label;
  a.deadline_ns = -1;
  return a;
}

Status Peer::call(Slot slot, const std::vector<strata_coll_item>& items, uint64_t tag, const char* label,
                  int32_t root) {
  strata_coll_args a = args(items, tag, label);
  a.root = root;
  if (mirror) return mirror->call(*this, slot, items, a);
  return take_failure(slot(comm, &a, nullptr));
}

Status Peer::barrier(const char* label, int64_t deadline_ns) {
  strata_coll_args a = args({}, 0, label);
  a.deadline_ns = deadline_ns;
  return take_failure(api->barrier(comm, &a));
}

strata_coll_item item(const void* in, void* out, uint64_t count, strata_dtype in_dtype, strata_dtype out_dtype) {
  return {sizeof(strata_coll_item), STRATA_ABI_MINOR, in, out, count, in_dtype, out_dtype};
}

std::string expect_ok(const Status& status) {
  return status.ok() ? "" : std::string("unexpected ") + status_name(status.code()) + ": " + status.text();
}

std::string expect_error(const Status& status, strata_status code, const std::vector<std::string>& parts) {
  const std::string got = std::string(status_name(status.code())) + ": " + status.text();
  if (status.code() != code) return "expected " + std::string(status_name(code)) + ", got " + got;
  for (const std::string& part : parts) {
    if (status.text().find(part) == std::string::npos) return "no \"" + part + "\" in " + got;
  }
  return "";
}

}  // namespace strata::test
