// wrapped_comm.h - an instance of another collective, whose failures come back as Errors.
//
// A plugin leaves the text of a failure with the host, for the thread that called it. Here that thread is a stream's
// worker, and the text has to travel on in an event; so the wrapped instance is opened with a host that keeps it.
// One caller at a time, as the interface asks; abort from any thread.
#pragma once

#include <string>

#include "plugin_kit/plugin_kit.h"
#include "strata/iface/collective.h"

namespace gpu_sim {

using strata::plugin_kit::Error;

class WrappedComm {
 public:
  WrappedComm() = default;
  WrappedComm(const WrappedComm&) = delete;
  ~WrappedComm() { close(); }

  // `args` are those of the plugin that wraps; finds `name` through its host.
  Error open(const std::string& name, strata_open_args args);
  void close();
  Error caps(strata_collective_caps* out);
  Error alloc(uint64_t bytes, void** out);
  void free(void* ptr) { api_->free(self_, ptr); }
  using Slot = decltype(strata_collective_api::all_gather) strata_collective_api::*;
  Error call(Slot slot, const strata_coll_args& args);
  Error barrier(const strata_coll_args& args);
  Error exchange(const void* in, void* out, uint64_t bytes, const strata_coll_args& args);
  void abort(const Error& why) { api_->abort(self_, why.code(), why.text().c_str()); }

 private:
  Error result(strata_status code);
  static void STRATA_CALL log(void* ctx, strata_log_level level, const char* domain, const char* text);
  static int32_t STRATA_CALL would_log(void* ctx, strata_log_level level);
  static strata_status STRATA_CALL fail(void* ctx, strata_status code, const char* text);
  static const void* STRATA_CALL get_interface(void* ctx, const char* id);
  static void STRATA_CALL parallel_for(void* ctx, uint64_t n, void(STRATA_CALL* fn)(void* arg, uint64_t i), void* arg);
  static uint32_t STRATA_CALL threads(void* ctx);

  const strata_host* host_ = nullptr;
  const strata_executor_api* executor_ = nullptr;
  strata_host own_host_{};
  std::string text_;
  const strata_collective_api* api_ = nullptr;
  strata_comm* self_ = nullptr;
};

}  // namespace gpu_sim
