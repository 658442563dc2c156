// shim.h - the part of a wrapper that all interfaces share: find the wrapped plugin, count calls, apply rules.
//
// A slot of a wrapper hands its call to one of
//   call     a call that is done when it returns. Late and held calls wait before they are passed on.
//   defer    a call that may end in an event, and whose order with others does not matter to the wrapped plugin.
//            With an event, a late or held call is passed on as a whole, later, by a thread of its own: until then
//            nothing has happened. Without one it waits like `call`.
//   complete a call that may end in an event, and that has to reach the wrapped plugin in order (collectives). With an
//            event it is passed on at once, and what is late or held is the completion.
// A call that fails by a rule is not passed on. No wait is longer than the instance's deadline: then the call, or its
// event, ends with DEADLINE_EXCEEDED. Closing ends every wait with CANCELLED.
//
// Threads: slots may be called as their header allows. Passing on is serialised for `defer` and `complete`, so that the
// wrapped plugin sees one [submit] caller at a time even when held calls come back.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "plugin_kit/plugin_kit.h"
#include "registry.h"
#include "rules.h"
#include "strata/host.h"

namespace strata::fault {

using plugin_kit::Error;

class Shim {
 public:
  ~Shim() { finish(); }

  // Reads the options and finds the wrapped plugin's table. `inner_args` are what to open it with.
  strata_status start(const Interface& interface, const strata_open_args* args, const void** table,
                      strata_open_args* inner_args);
  // Ends what is held and joins the threads. Call before the wrapped instance is closed.
  void finish();

  template <class Inner>
  strata_status call(const char* op, uint64_t bytes, Inner inner) noexcept {
    return guarded([&]() -> strata_status {
      if (const Match match = enter(op, bytes)) {
        if (const Error e = apply(match); !e.ok()) return fail(e);
      }
      return inner();
    });
  }
  // For slots without a status: whatever the wait comes to, the call is passed on.
  template <class Inner>
  void call_void(const char* op, Inner inner) noexcept {
    guarded([&]() -> strata_status {
      if (const Match match = enter(op, 0)) (void)apply(match);
      inner();
      return STRATA_OK;
    });
  }

  using Submit = std::function<strata_status(strata_event* done)>;
  strata_status defer(const char* op, uint64_t bytes, strata_event* done, Submit inner) noexcept;
  strata_status complete(const char* op, uint64_t bytes, strata_event* done, Submit inner) noexcept;
  // `half` passes on half of the bytes, and is done when it returns; used when the rule says short.
  strata_status transfer(const char* op, uint64_t bytes, strata_event* done, Submit whole,
                         std::function<strata_status()> half) noexcept;

  bool hide_map() const { return hide_map_; }
  strata_status fail(const Error& e) const { return plugin_kit::fail(host_, e.code(), e.text()); }
  const strata_host* host() const { return host_; }

 private:
  // A call that a rule speaks of.
  struct Match {
    const Rule* rule = nullptr;
    const char* op = nullptr;
    uint64_t number = 0;
    explicit operator bool() const { return rule != nullptr; }
  };
  struct OpState {
    std::atomic<uint64_t> calls{0};
    Counter* counter = nullptr;
    std::vector<const Rule*> rules;
  };
  struct Helper {
    std::thread thread;
    std::atomic<bool> finished{false};
  };

  template <class Body>
  strata_status guarded(Body&& body) noexcept {
    return plugin_kit::guard(host_, "fault", std::forward<Body>(body));
  }
  strata_status read_options(const Interface& interface, const strata_open_args* args, std::string* wraps);
  strata_status find_wrapped(const Interface& interface, const std::string& wraps, const void** table,
                             const strata_options** options);
  Match enter(const char* op, uint64_t bytes);
  // Waits, or fails, as the rule says. Short is no matter of this.
  Error apply(const Match& match);
  std::string describe(const Match& match) const;
  strata_status pass_on(const Submit& inner, strata_event* done);
  void in_background(std::function<void()> work);

  const strata_host* host_ = nullptr;
  const strata_sync_api* sync_ = nullptr;
  std::string wrapped_;
  int64_t deadline_ns_ = -1;
  bool hide_map_ = false;
  std::vector<Rule> rules_;
  std::map<std::string, OpState, std::less<>> ops_;  // fixed after start
  std::atomic<bool> closing_{false};
  std::mutex submit_mutex_, helpers_mutex_;
  std::list<Helper> helpers_;
};

// What every wrapper instance holds.
template <class Api, class Handle>
struct Wrapper {
  Shim shim;
  const Api* api = nullptr;
  Handle* inner = nullptr;
};

// Finds and opens what is wrapped. On failure nothing is left behind.
template <class Instance>
strata_status open_wrapper(const Interface& interface, const strata_open_args* args, Instance** out) noexcept {
  return plugin_kit::guard(args->host, "fault open", [&]() -> strata_status {
    auto instance = std::make_unique<Instance>();
    const void* table = nullptr;
    strata_open_args inner_args = *args;
    if (strata_status code = instance->shim.start(interface, args, &table, &inner_args)) return code;
    instance->api = static_cast<decltype(instance->api)>(table);
    const strata_status code =
        instance->shim.call("open", 0, [&] { return instance->api->open(&inner_args, &instance->inner); });
    if (code == STRATA_OK) *out = instance.release();
    return code;
  });
}

template <class Instance>
void close_wrapper(Instance* instance) noexcept {
  instance->shim.call_void("close", [&] {
    instance->shim.finish();
    instance->api->close(instance->inner);
  });
  delete instance;
}

}  // namespace strata::fault
