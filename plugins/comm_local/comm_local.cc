// comm_local - strata.collective/1 for the ranks of one machine: processes over shared memory, or threads.
//
// This file is the ABI side: one function per slot, which checks its arguments, keeps exceptions in, and hands errors
// to the host. Reading order of the rest: env (who am I), meeting (how ranks find each other), board (steps, waiting,
// failure), memory (what others can read), exchange (the collectives), libs/rank_sum (copy and sum).
//
// Work is done when a call returns; `done` events are set before that. Besides the registry of meeting_threads.cc there
// is no global state. In a child forked after open every call but close fails: it would speak for its parent.
#include <cstring>
#include <memory>
#include <new>

#include "env.h"
#include "exchange.h"
#include "meeting.h"
#include "strata/plugin.h"

using namespace comm_local;

struct strata_comm {
  const strata_host* host = nullptr;
  Identity id;
  int64_t deadline_ns = 0;
  pid_t pid = 0;
  Met met;
  std::unique_ptr<Exchange> exchange;
};

namespace {

strata_status report(const strata_host* host, const Error& e) {
  return e.ok() ? STRATA_OK : host->fail(host->ctx, e.code(), ("comm_local: " + e.text()).c_str());
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
  return {STRATA_FAILED_PRECONDITION, "called in a child forked after open; open a collective of its own there"};
}

// ---- open and close ----

Error read_isa(const strata_options* options, Isa* out) {
  *out = strata::rank_sum::best_isa();
  for (uint64_t k = 0; options && k < options->count; ++k) {
    const char* at = reinterpret_cast<const char*>(options->items) + k * options->stride;
    const auto& option = *reinterpret_cast<const strata_option*>(at);
    const std::string key = option.key;
    if (key != "isa" || option.type != STRATA_OPT_STRING) {
      return {STRATA_INVALID_ARGUMENT, "option \"" + key + "\": comm_local has one option, the string \"isa\""};
    }
    const std::string value = option.s;
    if (value == "auto") continue;
    bool known = false;
    for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
      if (value != strata::rank_sum::isa_name(isa)) continue;
      known = true;
      *out = isa;
    }
    if (!known) return {STRATA_INVALID_ARGUMENT, "isa = \"" + value + "\": it is auto, scalar, avx2 or avx512"};
    if (!strata::rank_sum::isa_runs_here(*out))
      return {STRATA_INVALID_ARGUMENT, "isa = \"" + value + "\": this CPU does not have it"};
  }
  return {};
}

// Leaves the job. A child forked after open only drops its copies; the seat is its parent's.
void leave(strata_comm* self) {
  if (self->met.board && ::getpid() == self->pid) self->met.board->leave();
  if (self->met.membership) self->met.membership->keep(self->met.memory.take_all());
}

Error open_into(const strata_open_args& args, strata_comm* self) {
  if (args.deadline_ns <= 0) {
    return {STRATA_INVALID_ARGUMENT,
            "open: deadline_ns is " + std::to_string(args.deadline_ns) + ", it must be above 0"};
  }
  self->deadline_ns = args.deadline_ns;
  Isa isa;
  if (Error e = read_isa(args.options, &isa); !e.ok()) return e;
  if (Error e = identify(args, &self->id); !e.ok()) return e;
  const Identity& id = self->id;
  const Deadline deadline = Deadline::after(args.deadline_ns);
  Error e = id.world == 1 ? meet_alone(&self->met)
            : id.threads  ? meet_threads(id, deadline, &self->met)
                          : meet_processes(id, deadline, &self->met);
  if (!e.ok()) return e;
  self->exchange = std::make_unique<Exchange>(self->met.board.get(), &self->met.memory, self->host, isa);
  // The first step of every rank: nobody is used before everybody is there.
  e = self->met.board->sync("opening job \"" + id.job + "\" (world " + std::to_string(id.world) + ")", deadline);
  if (e.ok()) self->met.board->settle();
  return e;
}

strata_status STRATA_CALL comm_open(const strata_open_args* args, strata_comm** out) {
  if (!args || !args->host || !out) return STRATA_INVALID_ARGUMENT;
  const strata_host* host = args->host;
  std::unique_ptr<strata_comm> self(new (std::nothrow) strata_comm);
  if (!self) return report(host, {STRATA_RESOURCE_EXHAUSTED, "open: out of memory"});
  self->host = host;
  self->pid = ::getpid();
  const Error e = guarded([&] { return open_into(*args, self.get()); });
  if (!e.ok()) {
    leave(self.get());
    return report(host, e);
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
  out->rank = self->id.rank;
  out->world = self->id.world;
  out->local_rank = self->id.local_rank;
  out->local_world = self->id.local_world;
  out->flags = STRATA_COLL_FIXED_ORDER | STRATA_COLL_ANY_OUTPUT;
  out->memory = STRATA_CPU;
  out->job = self->id.job.c_str();
  return STRATA_OK;
}

// ---- memory ----

strata_status STRATA_CALL comm_alloc(strata_comm* self, uint64_t bytes, void** out) {
  return report(self->host, guarded([&] {
                  Error e = check_process(self);
                  return e.ok() ? self->met.memory.alloc(bytes, out) : e;
                }));
}

void STRATA_CALL comm_free(strata_comm* self, void* ptr) {
  if (!ptr) return;
  const Error e = guarded([&]() -> Error {
    if (Error wrong = check_process(self); !wrong.ok()) return wrong;
    // After a failure another thread's rank may still be reading; see Membership::keep.
    const bool failed = !self->met.board->failure().ok();
    if (Error wrong = self->met.memory.free(ptr, failed); !wrong.ok()) return wrong;
    self->met.board->mine().frees.fetch_add(1);
    return {};
  });
  if (!e.ok()) self->host->log(self->host->ctx, STRATA_LOG_HOST_MISBEHAVING, "comm_local", e.text().c_str());
}

// ---- collectives ----

Error run_one(strata_comm* self, Op op, const strata_coll_args* args) {
  if (Error e = check_process(self); !e.ok()) return e;
  Board& board = *self->met.board;
  if (!args || !STRATA_HAS(args, strata_coll_args, deadline_ns)) {
    return board.fail({STRATA_INVALID_ARGUMENT, "a collective without arguments, or with a short struct"},
                      {STRATA_FAILED_PRECONDITION, board.who(self->id.rank) + " gave up: it called without arguments"});
  }
  const int64_t given = args->deadline_ns;
  const Deadline deadline = Deadline::after(given > 0 ? std::min(given, self->deadline_ns) : self->deadline_ns);
  Error e = guarded([&] { return self->exchange->run(op, *args, deadline); });
  if (!e.ok()) e = board.fail(e);  // keeps what is kept already; new only when memory ran out
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
    Board& board = *self->met.board;
    const std::string why = text ? text : "no reason given";
    return board.fail({code == STRATA_OK ? STRATA_CANCELLED : code, "aborted: " + why},
                      {STRATA_CANCELLED, board.who(self->id.rank) + " aborted: " + why});
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

const strata_plugin descriptor = {sizeof(strata_plugin), STRATA_ABI_MINOR, "comm_local", "0.1.0", get_interface};

}  // namespace

extern "C" STRATA_EXPORT const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) { return &descriptor; }
