// comm_local - strata.collective/1 for the ranks of one machine: processes over shared memory, or threads.
//
// This file is the ABI side: what libs/collective_kit puts behind the slots of the table. Reading order of the rest:
// env (who am I), meeting (how ranks find each other), board (steps, waiting, failure), memory (what others can read),
// exchange (the collectives), libs/rank_sum (copy and sum).
//
// Work is done when a call returns; `done` events are set before that. Besides the registry of meeting_threads.cc there
// is no global state. In a child forked after open every call but close fails: it would speak for its parent.
#include <cstring>
#include <memory>

#include "collective_kit/slots.h"
#include "env.h"
#include "exchange.h"
#include "meeting.h"
#include "strata/plugin.h"

using namespace comm_local;
using strata::collective_kit::Part;

struct strata_comm : strata::collective_kit::Comm {
  static constexpr char kName[] = "comm_local";
  Error open(const strata_open_args& args);
  Error open_part(strata_comm& whole, const Part& part, const Deadline& deadline);
  void leave();
  void caps(strata_collective_caps* out) const;
  Error alloc(uint64_t bytes, void** out) { return met_.memory.alloc(bytes, out); }
  Error free(void* ptr);
  Error run(Op op, const strata_coll_args& args, const Deadline& deadline, strata_event* done);
  Error fail(const Error& mine, const Error& others) { return met_.board->fail(mine, others); }
  std::string who() const { return met_.board->who(id_.rank); }

 private:
  Error meet(const Deadline& deadline);

  Isa isa_ = Isa::kScalar;
  Identity id_;
  Met met_;
  std::unique_ptr<Exchange> exchange_;
};

namespace {

Error read_isa(const std::string& value, Isa* out) {
  *out = strata::rank_sum::best_isa();
  if (value == "auto") return {};
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (value != strata::rank_sum::isa_name(isa)) continue;
    *out = isa;
    if (strata::rank_sum::isa_runs_here(isa)) return {};
    return {STRATA_INVALID_ARGUMENT, "isa = \"" + value + "\": this CPU does not have it"};
  }
  return {STRATA_INVALID_ARGUMENT, "isa = \"" + value + "\": it is auto, scalar, avx2 or avx512"};
}

}  // namespace

Error strata_comm::open(const strata_open_args& args) {
  const std::string asked = strata::plugin_kit::Options(args.options).text("isa", "auto");
  if (Error e = read_isa(asked, &isa_); !e.ok()) return e;
  if (Error e = identify_here(args, &id_); !e.ok()) return e;
  return meet(Deadline::after(deadline_ns));
}

Error strata_comm::open_part(strata_comm& whole, const Part& part, const Deadline& deadline) {
  isa_ = whole.isa_;
  id_ = whole.id_;
  id_.rank = id_.local_rank = part.rank;
  id_.world = id_.local_world = part.world();
  id_.job += part.name;
  met_.whole = whole.met_.board.get();
  met_.members = part.members;
  return meet(deadline);
}

Error strata_comm::meet(const Deadline& deadline) {
  Error e = id_.world == 1 ? meet_alone(id_, &met_)
            : id_.threads  ? meet_threads(id_, deadline, &met_)
                           : meet_processes(id_, deadline, &met_);
  if (!e.ok()) return e;
  exchange_ = std::make_unique<Exchange>(met_.board.get(), &met_.memory, host, isa_);
  // The first step of every rank: nobody is used before everybody is there.
  e = met_.board->sync("opening job \"" + id_.job + "\" (world " + std::to_string(id_.world) + ")", deadline);
  if (e.ok()) met_.board->settle();
  return e;
}

// A child forked after open only drops its copies; the seat is its parent's.
void strata_comm::leave() {
  if (met_.board && !in_child()) met_.board->leave();
  if (met_.membership) met_.membership->keep(met_.memory.take_all());
}

void strata_comm::caps(strata_collective_caps* out) const {
  out->rank = id_.rank;
  out->world = id_.world;
  out->local_rank = id_.local_rank;
  out->local_world = id_.local_world;
  out->flags = STRATA_COLL_FIXED_ORDER | STRATA_COLL_ANY_OUTPUT;
  out->memory = STRATA_CPU;
  out->job = id_.job.c_str();
}

Error strata_comm::free(void* ptr) {
  // After a failure another thread's rank may still be reading; see Membership::keep.
  const bool failed = !met_.board->failure().ok();
  if (Error e = met_.memory.free(ptr, failed); !e.ok()) return e;
  met_.board->mine().frees.fetch_add(1);
  return {};
}

Error strata_comm::run(Op op, const strata_coll_args& args, const Deadline& deadline, strata_event* done) {
  Error e = exchange_->run(op, args, deadline);
  return e.ok() ? strata::plugin_kit::set_done(host, done) : e;
}

namespace {

const void* STRATA_CALL get_interface(const char* id) {
  return id && std::strcmp(id, STRATA_COLLECTIVE) == 0 ? &strata::collective_kit::Slots<strata_comm>::table : nullptr;
}

const strata_plugin descriptor = {sizeof(strata_plugin), STRATA_ABI_MINOR, "comm_local", "0.1.0", get_interface};

}  // namespace

extern "C" STRATA_EXPORT const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) { return &descriptor; }
