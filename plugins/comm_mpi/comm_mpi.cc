// comm_mpi - strata.collective/1 over Open MPI, for ranks that mpirun starts on one or many machines.
//
// This file is the ABI side: one function per slot, which checks its arguments, keeps exceptions in, and hands errors
// to the host. Reading order of the rest: process (MPI, once per process), group (who am I), channel (posts, waiting,
// failure), exchange and exchange_move (the collectives), libs/rank_sum (the additions).
//
// Work is done when a call returns; `done` events are set before that. MPI cannot cancel what has begun: after a
// failure an instance only answers with it, close() calls nothing of MPI, and MPI_Finalize is left out at exit, so that
// the process ends in bounded time. In a child forked after open every call but close fails.
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <new>

#include "exchange.h"
#include "host_memory/host_memory.h"
#include "plugin_kit/plugin_kit.h"
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

struct strata_comm {
  const strata_host* host = nullptr;
  int64_t deadline_ns = 0;
  pid_t pid = 0;
  Group group;
  std::shared_ptr<Memory> memory = std::make_shared<Memory>();
  std::shared_ptr<Channel> channel;
  std::shared_ptr<Exchange> exchange;
};

namespace {

strata_status report(const strata_host* host, const Error& e) {
  return e.ok() ? STRATA_OK : strata::plugin_kit::fail(host, e.code(), "comm_mpi: " + e.text());
}

// Runs `body`, which returns an Error, and keeps any exception (memory is all the code can run out of) inside.
template <class Body>
Error guarded(const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return {STRATA_RESOURCE_EXHAUSTED, "out of memory"};
  } catch (const std::exception& e) {
    return {STRATA_INTERNAL, e.what()};
  }
}

Error check_process(const strata_comm* self) {
  if (::getpid() == self->pid) return {};
  return {STRATA_FAILED_PRECONDITION, "called in a child forked after open; MPI cannot be used there"};
}

// ---- open and close ----

// Leaves the job. What MPI may still read or write is handed to the process, which keeps it.
void leave(strata_comm* self) {
  if (!self->channel || ::getpid() != self->pid) return;
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (!finalised && !self->channel->leave()) Process::get().keep(self->channel);
  if (self->exchange && self->exchange->in_flight()) {
    Process::get().keep(self->exchange);
    Process::get().keep(self->memory);
  }
  if (self->channel->failure().ok() || self->group.world == 1) return;
  self->host->log(self->host->ctx, STRATA_LOG_WARN, "comm_mpi",
                  "closed after a failure: this process will end without MPI_Finalize, which would wait for ranks that "
                  "may not come; mpirun then ends the job");
}

Error open_into(const strata_open_args& args, strata_comm* self) {
  if (args.deadline_ns <= 0) {
    return {STRATA_INVALID_ARGUMENT,
            "open: deadline_ns is " + std::to_string(args.deadline_ns) + ", it must be above 0"};
  }
  self->deadline_ns = args.deadline_ns;
  if (Error e = check_args(args); !e.ok()) return e;
  const Deadline deadline{std::chrono::nanoseconds(args.deadline_ns)};
  if (Error e = Process::get().start(deadline); !e.ok()) return e;
  if (Error e = join(args, deadline, &self->group); !e.ok()) return e;
  self->channel = std::make_shared<Channel>(self->group);
  self->exchange = std::make_shared<Exchange>(self->channel.get(), self->group.data, self->host);
  return self->channel->open(deadline);
}

strata_status STRATA_CALL comm_open(const strata_open_args* args, strata_comm** out) {
  if (!args || !args->host || !out) return STRATA_INVALID_ARGUMENT;
  std::unique_ptr<strata_comm> self;
  const Error e = guarded([&] {
    self = std::make_unique<strata_comm>();
    self->host = args->host;
    self->pid = ::getpid();
    return open_into(*args, self.get());
  });
  if (!e.ok()) {
    if (self) {
      (void)guarded([&] {
        leave(self.get());
        return Error();
      });
    }
    return report(args->host, e);
  }
  *out = self.release();
  return STRATA_OK;
}

void STRATA_CALL comm_close(strata_comm* self) {
  (void)guarded([&] {
    leave(self);
    return Error();
  });
  delete self;
}

strata_status STRATA_CALL comm_caps(strata_comm* self, strata_collective_caps* out) {
  if (!STRATA_HAS(out, strata_collective_caps, job)) {
    return report(self->host, {STRATA_INVALID_ARGUMENT, "caps: struct_size is " + std::to_string(out->struct_size)});
  }
  out->rank = self->group.rank;
  out->world = self->group.world;
  out->local_rank = self->group.local_rank;
  out->local_world = self->group.local_world;
  out->flags = STRATA_COLL_FIXED_ORDER | STRATA_COLL_ANY_MEMORY | STRATA_COLL_ANY_OUTPUT;
  out->memory = STRATA_CPU;
  out->job = self->group.job.c_str();
  return STRATA_OK;
}

// ---- memory ----

strata_status STRATA_CALL comm_alloc(strata_comm* self, uint64_t bytes, void** out) {
  return report(self->host, guarded([&]() -> Error {
                  *out = self->memory->alloc(bytes);
                  if (*out) return {};
                  return {STRATA_RESOURCE_EXHAUSTED, "alloc of " + std::to_string(bytes) + " bytes: out of memory"};
                }));
}

void STRATA_CALL comm_free(strata_comm* self, void* ptr) {
  if (!ptr || self->exchange->in_flight()) return;  // in flight: kept, see leave()
  if (self->memory->free(ptr)) return;
  self->host->log(self->host->ctx, STRATA_LOG_HOST_MISBEHAVING, "comm_mpi",
                  "free of an address that alloc did not give out");
}

// ---- collectives ----

Error run_one(strata_comm* self, Op op, const strata_coll_args* args) {
  if (Error e = check_process(self); !e.ok()) return e;
  Channel& channel = *self->channel;
  if (!args || !STRATA_HAS(args, strata_coll_args, deadline_ns)) {
    return channel.fail(
        {STRATA_INVALID_ARGUMENT, "a collective without arguments, or with a short struct"},
        {STRATA_FAILED_PRECONDITION, channel.who(self->group.rank) + " gave up: it called without arguments"});
  }
  const int64_t given = args->deadline_ns;
  const Deadline deadline{std::chrono::nanoseconds(given > 0 ? std::min(given, self->deadline_ns) : self->deadline_ns)};
  Error e = guarded([&] { return self->exchange->run(op, *args, deadline); });
  if (!e.ok()) e = channel.fail(e);  // keeps what is kept already; new only when memory ran out
  return e;
}

strata_status collective(strata_comm* self, Op op, const strata_coll_args* args, strata_event* done) {
  const Error e = run_one(self, op, args);
  if (!e.ok() || !done) return report(self->host, e);
  const auto* sync = static_cast<const strata_sync_api*>(self->host->get_interface(self->host->ctx, STRATA_HOST_SYNC));
  if (!sync) return report(self->host, {STRATA_FAILED_PRECONDITION, "a done event was given by a host without events"});
  sync->set(done, STRATA_OK, nullptr);
  return STRATA_OK;
}

strata_status STRATA_CALL comm_all_gather(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return collective(self, Op::kAllGather, args, done);
}
strata_status STRATA_CALL comm_reduce_scatter(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return collective(self, Op::kReduceScatter, args, done);
}
strata_status STRATA_CALL comm_all_reduce(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return collective(self, Op::kAllReduce, args, done);
}
strata_status STRATA_CALL comm_broadcast(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return collective(self, Op::kBroadcast, args, done);
}
strata_status STRATA_CALL comm_all_to_all(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return collective(self, Op::kAllToAll, args, done);
}
strata_status STRATA_CALL comm_barrier(strata_comm* self, const strata_coll_args* args) {
  return collective(self, Op::kBarrier, args, nullptr);
}

// Here the collective fails with the caller's code; elsewhere it is CANCELLED, by the rank that is named.
void STRATA_CALL comm_abort(strata_comm* self, strata_status code, const char* text) {
  (void)guarded([&] {
    if (Error e = check_process(self); !e.ok()) return e;
    const std::string why = text ? text : "no reason given";
    return self->channel->fail({code == STRATA_OK ? STRATA_CANCELLED : code, "aborted: " + why},
                               {STRATA_CANCELLED, self->channel->who(self->group.rank) + " aborted: " + why});
  });
}

const strata_collective_api collective_table = {
    sizeof(strata_collective_api),
    STRATA_ABI_MINOR,
    comm_open,
    comm_close,
    comm_caps,
    comm_alloc,
    comm_free,
    comm_all_gather,
    comm_reduce_scatter,
    comm_all_reduce,
    comm_broadcast,
    comm_all_to_all,
    comm_barrier,
    comm_abort,
};

const void* STRATA_CALL get_interface(const char* id) {
  return id && std::strcmp(id, STRATA_COLLECTIVE) == 0 ? &collective_table : nullptr;
}

const strata_plugin descriptor = {sizeof(strata_plugin), STRATA_ABI_MINOR, "comm_mpi", "0.1.0", get_interface};

}  // namespace

extern "C" STRATA_EXPORT const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) { return &descriptor; }
