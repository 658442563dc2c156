// host.h - what the core lends its plugins: the implementation behind strata/host.h, one per engine.
//
// A plugin reports a failure as `return host->fail(ctx, code, text)`; the text lands in thread-local storage of the
// core and `take_failure` joins it with the code the call returned.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/plugins/event.h"
#include "core/plugins/executor.h"
#include "core/status.h"
#include "strata/host.h"

namespace strata {

using LogSink = std::function<void(strata_log_level level, const std::string& domain, const std::string& text)>;

// Finds other plugins for a plugin that wraps one; the engine provides it (see plugins.h).
class PluginFinder {
 public:
  virtual ~PluginFinder() = default;
  virtual Status find(const std::string& name, const std::string& interface_id, const void** table) = 0;
  virtual Status options(const std::string& name, const strata_options** out) = 0;
};

class Host {
 public:
  Host(LogSink sink, strata_log_level level, unsigned threads, PluginFinder* plugins = nullptr);
  Host(const Host&) = delete;

  const strata_host* c() const { return &table_; }
  Executor& executor() { return *executor_; }
  // Before any work runs: the number of threads is known only when the ranks of this machine are.
  void set_threads(unsigned threads, const std::vector<int>& cpus) {
    executor_ = std::make_unique<Executor>(threads, cpus);
  }
  void log(strata_log_level level, const std::string& domain, const std::string& text) const;
  bool would_log(strata_log_level level) const { return level >= level_; }
  PluginFinder* plugins() const { return plugins_; }

 private:
  LogSink sink_;
  strata_log_level level_;
  std::unique_ptr<Executor> executor_;
  PluginFinder* plugins_;
  strata_host table_;
};

// The Status of a plugin call that returned `code` on this thread; clears the text that `fail` kept.
Status take_failure(strata_status code);
// While it is there, this thread runs a callback of the host's: engine functions refuse to be called from inside it.
class HostCallback {
 public:
  explicit HostCallback(const char* name);
  ~HostCallback();
  HostCallback(const HostCallback&) = delete;
  // Of the one this thread runs; NULL: none.
  static const char* running();
};
// Keeps a text for the next take_failure on this thread, and returns the status's code.
strata_status keep_failure(const Status& status);

}  // namespace strata
