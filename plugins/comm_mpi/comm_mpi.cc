// comm_mpi - strata.collective/1 over Open MPI, for ranks that mpirun starts on one or many machines.
//
// This file is the ABI side: the class behind the slots of libs/collective_kit. Reading order of the rest: process
// (MPI, once per process), group (who am I), channel (posts, waiting, failure), exchange and exchange_move (the
// collectives), libs/rank_sum (the additions).
//
// Work is done when a call returns; `done` events are set before that. MPI cannot cancel what has begun: after a
// failure an instance only answers with it, close() calls nothing of MPI, and MPI_Finalize is left out at exit, so that
// the process ends in bounded time. In a child forked after open every call but close fails.
#include <cstring>
#include <map>
#include <memory>

#include "collective_kit/slots.h"
#include "exchange.h"
#include "host_memory/host_memory.h"
#include "process.h"
#include "strata/plugin.h"

using namespace comm_mpi;

namespace {

// What alloc has given out. MPI takes any memory, so this is ordinary memory.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() {
    for (const auto& [ptr, bytes] : pieces_) strata::host_memory::release(ptr, bytes);
  }
  void* alloc(uint64_t bytes) {
    bytes = std::max<uint64_t>(bytes, 1);
    void* const ptr = strata::host_memory::allocate(bytes);
    if (ptr) pieces_[ptr] = bytes;
    return ptr;
  }
  bool free(void* ptr) {
    const auto at = pieces_.find(ptr);
    if (at == pieces_.end()) return false;
    strata::host_memory::release(ptr, at->second);
    pieces_.erase(at);
    return true;
  }

 private:
  std::map<void*, uint64_t> pieces_;
};

}  // namespace

struct strata_comm : strata::collective_kit::Comm {
  static constexpr char kName[] = "comm_mpi";
  Error open(const strata_open_args& args);
  Error open_part(strata_comm& whole, const strata::collective_kit::Part& part, const Deadline& deadline);
  void leave();
  void caps(strata_collective_caps* out) const;
  Error alloc(uint64_t bytes, void** out);
  Error free(void* ptr);
  Error run(Op op, const strata_coll_args& args, const Deadline& deadline, strata_event* done);
  Error fail(const Error& mine, const Error& others) { return channel_->fail(mine, others); }
  std::string who() const { return channel_->who(group_.rank); }

 private:
  Error start(Channel* whole, const Deadline& deadline);

  Group group_;
  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
  std::shared_ptr<Channel> channel_;
  std::shared_ptr<Exchange> exchange_;
};

Error strata_comm::open(const strata_open_args& args) {
  if (Error e = check_args(args); !e.ok()) return e;
  const Deadline deadline = Deadline::after(deadline_ns);
  if (Error e = Process::get().start(deadline); !e.ok()) return e;
  if (Error e = join(args, deadline, &group_); !e.ok()) return e;
  return start(nullptr, deadline);
}

Error strata_comm::open_part(strata_comm& whole, const strata::collective_kit::Part& part, const Deadline& deadline) {
  if (Error e = join_part(whole.group_, part, deadline, &group_); !e.ok()) return e;
  return start(whole.channel_.get(), deadline);
}

Error strata_comm::start(Channel* whole, const Deadline& deadline) {
  channel_ = std::make_shared<Channel>(group_, whole);
  exchange_ = std::make_shared<Exchange>(channel_.get(), group_.data, host);
  return channel_->open(deadline);
}

// What MPI may still read or write is handed to the process, which keeps it.
void strata_comm::leave() {
  if (!channel_ || in_child()) return;
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (!finalised && !channel_->leave()) Process::get().keep(channel_);
  if (exchange_ && exchange_->in_flight()) {
    Process::get().keep(exchange_);
    Process::get().keep(memory_);
  }
  if (channel_->failure().ok() || group_.world == 1) return;
  host->log(host->ctx, STRATA_LOG_WARN, kName,
            "closed after a failure: this process will end without MPI_Finalize, which would wait for ranks that may "
            "not come; mpirun then ends the job");
}

void strata_comm::caps(strata_collective_caps* out) const {
  out->rank = group_.rank;
  out->world = group_.world;
  out->local_rank = group_.local_rank;
  out->local_world = group_.local_world;
  out->flags = STRATA_COLL_FIXED_ORDER | STRATA_COLL_ANY_MEMORY | STRATA_COLL_ANY_OUTPUT;
  out->memory = STRATA_CPU;
  out->job = group_.job.c_str();
}

Error strata_comm::alloc(uint64_t bytes, void** out) {
  *out = memory_->alloc(bytes);
  if (*out) return {};
  return {STRATA_RESOURCE_EXHAUSTED, "alloc of " + std::to_string(bytes) + " bytes: out of memory"};
}

Error strata_comm::free(void* ptr) {
  if (exchange_->in_flight() || memory_->free(ptr)) return {};  // in flight: kept, see leave()
  return {STRATA_INVALID_ARGUMENT, "free of an address that alloc did not give out"};
}

Error strata_comm::run(Op op, const strata_coll_args& args, const Deadline& deadline, strata_event* done) {
  Error e = exchange_->run(op, args, deadline);
  return e.ok() ? strata::plugin_kit::set_done(host, done) : e;
}

namespace {

const void* STRATA_CALL get_interface(const char* id) {
  return id && std::strcmp(id, STRATA_COLLECTIVE) == 0 ? &strata::collective_kit::Slots<strata_comm>::table : nullptr;
}

const strata_plugin descriptor = {sizeof(strata_plugin), STRATA_ABI_MINOR, "comm_mpi", "0.1.0", get_interface};

}  // namespace

extern "C" STRATA_EXPORT const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) { return &descriptor; }
