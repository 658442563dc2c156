// slots.h - the table of strata.collective/1 over a class, for plugins written in C++.
//
// A plugin defines `struct strata_comm : collective_kit::Comm` with what is listed there and returns
// `&Slots<strata_comm>::table`. The slots check arguments, keep exceptions in, hand errors to the host with the
// plugin's name in front, and refuse every call but close in a child forked after open.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective_kit/post.h"
#include "plugin_kit/deadline.h"
#include "plugin_kit/plugin_kit.h"
#include "strata/iface/collective.h"

namespace strata::collective_kit {

using plugin_kit::Deadline;
using plugin_kit::Error;

constexpr uint64_t kLargestExchange = 1 << 20;  // bytes a rank gives

// One of the instances that a split makes.
struct Part {
  std::string name;          // ".1.0": first split, colour 0; behind the job's name it is the name of the part's job
  std::vector<int> members;  // ranks of the instance that is split, in the part's order
  int rank = 0;              // this one's place among them
  int world() const { return static_cast<int>(members.size()); }
};

// What the slots keep for an instance. A plugin's class adds
//   static constexpr char kName[]              its id: opens every text
//   Error open(const strata_open_args&)        meets the other ranks; `host` and `deadline_ns` are set
//   void leave()                               before the instance is deleted, also after a failed open
//   void caps(strata_collective_caps*)
//   Error alloc(uint64_t bytes, void** out)
//   Error free(void* ptr)                      never NULL; an error is logged
//   Error run(Op, const strata_coll_args&, const Deadline&, strata_event* done)
//                                              starts or does the call; sets `done`, if there is one, when it is done
//   Error fail(const Error& mine, const Error& others)
//                                              keeps the first failure, tells the others; returns the one that is kept
//   std::string who()                          this rank, in errors that others show
// and, where small messages of the host have a channel of their own,
//   Error exchange(const void* in, void* out, uint64_t bytes, const strata_coll_args&, const Deadline&)
//                                              without it an exchange is an all-gather, through memory of `alloc`
// and, where it can be split,
//   Error open_part(strata_comm& whole, const Part&, const Deadline&)
//                                              in place of `open`; a failure of either is one of both from then on
struct Comm {
  const strata_host* host = nullptr;
  int64_t deadline_ns = 0;
  pid_t pid = 0;

  // For an exchange by all-gather.
  void* mailbox = nullptr;
  uint64_t mailbox_bytes = 0;

  uint64_t splits = 0;

  bool in_child() const { return ::getpid() != pid; }
  Error check_process() const {
    if (!in_child()) return {};
    return {STRATA_FAILED_PRECONDITION, "called in a child forked after open; a collective stays with its process"};
  }
};

template <class Instance>
class Slots {
  static strata_status STRATA_CALL open(const strata_open_args* args, Instance** out) {
    if (!args || !args->host || !out) return STRATA_INVALID_ARGUMENT;
    return plugin_kit::guard(args->host, Instance::kName, [&]() -> Error {
      if (args->deadline_ns <= 0) {
        return {STRATA_INVALID_ARGUMENT,
                "open: deadline_ns is " + std::to_string(args->deadline_ns) + ", it must be above 0"};
      }
      return make(
          args->host, args->deadline_ns, [&](Instance& self) { return self.open(*args); }, out);
    });
  }

  // A new instance, opened; on failure nothing is left of it.
  template <class Open>
  static Error make(const strata_host* host, int64_t deadline_ns, const Open& open_it, Instance** out) {
    std::unique_ptr<Instance> self;
    Error e = plugin_kit::attempt([&]() -> Error {
      self = std::make_unique<Instance>();
      self->host = host;
      self->deadline_ns = deadline_ns;
      self->pid = ::getpid();
      return open_it(*self);
    });
    if (e.ok()) {
      *out = self.release();
    } else if (self) {
      (void)plugin_kit::attempt([&] { self->leave(); });
    }
    return e;
  }

  static void STRATA_CALL close(Instance* self) {
    (void)plugin_kit::attempt([&] { self->leave(); });
    delete self;
  }

  static strata_status STRATA_CALL caps(Instance* self, strata_collective_caps* out) {
    return plugin_kit::guard(self->host, Instance::kName, [&]() -> Error {
      if (!STRATA_HAS(out, strata_collective_caps, job)) {
        return {STRATA_INVALID_ARGUMENT, "caps: struct_size is " + std::to_string(out->struct_size)};
      }
      self->caps(out);
      return {};
    });
  }

  static strata_status STRATA_CALL alloc(Instance* self, uint64_t bytes, void** out) {
    return plugin_kit::guard(self->host, Instance::kName, [&]() -> Error {
      Error e = self->check_process();
      return e.ok() ? self->alloc(bytes, out) : e;
    });
  }

  static void STRATA_CALL free(Instance* self, void* ptr) {
    if (!ptr) return;
    const Error e = plugin_kit::attempt([&]() -> Error {
      Error wrong = self->check_process();
      return wrong.ok() ? self->free(ptr) : wrong;
    });
    if (!e.ok()) self->host->log(self->host->ctx, STRATA_LOG_HOST_MISBEHAVING, Instance::kName, e.text().c_str());
  }

  static Deadline deadline_of(const Instance* self, const strata_coll_args& args) {
    const int64_t given = args.deadline_ns;
    return Deadline::after(given > 0 ? std::min(given, self->deadline_ns) : self->deadline_ns);
  }

  static Error run(Instance* self, Op op, const strata_coll_args* args, strata_event* done) {
    if (Error e = self->check_process(); !e.ok()) return e;
    if (!args || !STRATA_HAS(args, strata_coll_args, deadline_ns)) {
      return self->fail({STRATA_INVALID_ARGUMENT, "a collective without arguments, or with a short struct"},
                        {STRATA_FAILED_PRECONDITION, self->who() + " gave up: it called without arguments"});
    }
    const Deadline deadline = deadline_of(self, *args);
    Error e = plugin_kit::attempt([&] { return self->run(op, *args, deadline, done); });
    return e.ok() ? e : self->fail(e, e);  // keeps what is kept already; new only when memory ran out
  }

  template <Op op>
  static strata_status STRATA_CALL collective(Instance* self, const strata_coll_args* args, strata_event* done) {
    return plugin_kit::guard(self->host, Instance::kName, [&] { return run(self, op, args, done); });
  }
  static strata_status STRATA_CALL barrier(Instance* self, const strata_coll_args* args) {
    return collective<Op::kBarrier>(self, args, nullptr);
  }

  // An all-gather through memory of the plugin, which the caller's is not.
  static Error exchange_by_gather(Instance* self, const void* in, void* out, uint64_t bytes,
                                  const strata_coll_args* args) {
    strata_collective_caps caps{};
    self->caps(&caps);
    const uint64_t need = bytes * (static_cast<uint64_t>(caps.world) + 1);
    if (need > self->mailbox_bytes) {
      if (self->mailbox) (void)self->free(std::exchange(self->mailbox, nullptr));
      if (Error e = self->alloc(need, &self->mailbox); !e.ok()) return self->fail(e, e);
      self->mailbox_bytes = need;
    }
    auto* mine = static_cast<char*>(self->mailbox);
    std::memcpy(mine, in, bytes);
    strata_coll_item item = {sizeof(item), STRATA_ABI_MINOR, mine, mine + bytes, bytes, STRATA_U8, STRATA_U8};
    strata_coll_args gather = *args;
    gather.items = &item;
    gather.item_count = 1;
    gather.item_stride = sizeof(item);
    if (Error e = run(self, Op::kAllGather, &gather, nullptr); !e.ok()) return e;
    std::memcpy(out, mine + bytes, need - bytes);
    return {};
  }
  static Error exchange_checked(Instance* self, const void* in, void* out, uint64_t bytes,
                                const strata_coll_args* args) {
    if (!args || !STRATA_HAS(args, strata_coll_args, deadline_ns) || bytes > kLargestExchange) {
      return self->fail({STRATA_INVALID_ARGUMENT, "an exchange of " + std::to_string(bytes) + " bytes, at most " +
                                                      std::to_string(kLargestExchange) + ", or without arguments"},
                        {STRATA_FAILED_PRECONDITION, self->who() + " gave up: it called exchange wrongly"});
    }
    if constexpr (requires { self->exchange(in, out, bytes, *args, deadline_of(self, *args)); }) {
      if (Error e = self->check_process(); !e.ok()) return e;
      const Deadline deadline = deadline_of(self, *args);
      Error e = plugin_kit::attempt([&] { return self->exchange(in, out, bytes, *args, deadline); });
      return e.ok() ? e : self->fail(e, e);
    } else {
      return plugin_kit::attempt([&] { return exchange_by_gather(self, in, out, bytes, args); });
    }
  }
  static strata_status STRATA_CALL exchange(Instance* self, const void* in, void* out, uint64_t bytes,
                                            const strata_coll_args* args) {
    return plugin_kit::guard(self->host, Instance::kName, [&] { return exchange_checked(self, in, out, bytes, args); });
  }

  // An exchange of the wishes, from which every rank sees all parts; then each part meets by itself.
  static strata_status STRATA_CALL split(Instance* self, int32_t colour, int32_t key, const strata_coll_args* args,
                                         Instance** out) {
    return plugin_kit::guard(self->host, Instance::kName, [&]() -> Error {
      struct Wish {
        int32_t colour, key;
      };
      strata_collective_caps caps{};
      self->caps(&caps);
      const Wish mine = {colour, key};
      std::vector<Wish> wishes(static_cast<size_t>(caps.world));
      if (Error e = exchange_checked(self, &mine, wishes.data(), sizeof(mine), args); !e.ok()) return e;
      Part part;
      part.name = "." + std::to_string(++self->splits) + "." + std::to_string(colour);
      const auto wish_of = [&](int rank) { return wishes[static_cast<size_t>(rank)]; };
      for (int r = 0; r < caps.world; ++r) {
        if (wish_of(r).colour == colour) part.members.push_back(r);
      }
      std::stable_sort(part.members.begin(), part.members.end(),
                       [&](int a, int b) { return wish_of(a).key < wish_of(b).key; });
      part.rank =
          static_cast<int>(std::find(part.members.begin(), part.members.end(), caps.rank) - part.members.begin());
      const Deadline deadline = deadline_of(self, *args);
      const auto open_part = [&](Instance& child) { return child.open_part(*self, part, deadline); };
      Error e = make(self->host, self->deadline_ns, open_part, out);
      return e.ok() ? e : self->fail(e, e);
    });
  }
  static constexpr auto split_slot() {
    using Slot = decltype(strata_collective_api::split);
    if constexpr (requires(Instance & i, const Part& part, const Deadline& d) { i.open_part(i, part, d); }) {
      return Slot(split);
    } else {
      return Slot(nullptr);
    }
  }

  // Here the collective fails with the caller's code; elsewhere it is CANCELLED, by the rank that is named.
  static void STRATA_CALL abort(Instance* self, strata_status code, const char* text) {
    (void)plugin_kit::attempt([&]() -> Error {
      if (Error e = self->check_process(); !e.ok()) return e;
      const std::string why = text ? text : "no reason given";
      return self->fail({code == STRATA_OK ? STRATA_CANCELLED : code, "aborted: " + why},
                        {STRATA_CANCELLED, self->who() + " aborted: " + why});
    });
  }

 public:
  static constexpr strata_collective_api table = {
      sizeof(strata_collective_api),
      STRATA_ABI_MINOR,
      open,
      close,
      caps,
      alloc,
      free,
      collective<Op::kAllGather>,
      collective<Op::kReduceScatter>,
      collective<Op::kAllReduce>,
      collective<Op::kBroadcast>,
      collective<Op::kAllToAll>,
      barrier,
      abort,
      exchange,
      split_slot(),
  };
};

}  // namespace strata::collective_kit
