// wrapped_comm.cc - the host that a wrapped collective sees.
#include "wrapped_comm.h"

#include <cstring>

namespace gpu_sim {

using strata::plugin_kit::host_interface;

Error WrappedComm::open(const std::string& name, strata_open_args args) {
  host_ = args.host;
  executor_ = host_interface<strata_executor_api>(host_, STRATA_HOST_EXECUTOR);
  auto* plugins = host_interface<strata_plugins_api>(host_, STRATA_HOST_PLUGINS);
  if (!plugins || !executor_) {
    return {STRATA_FAILED_PRECONDITION, "the host lacks " STRATA_HOST_PLUGINS " or " STRATA_HOST_EXECUTOR};
  }
  const void* table = nullptr;
  strata_status code = plugins->find(host_->ctx, name.c_str(), STRATA_COLLECTIVE, &table);
  if (code == STRATA_OK) code = plugins->options(host_->ctx, name.c_str(), &args.options);
  if (code != STRATA_OK) return {code, ""};
  own_host_ = {sizeof(own_host_), STRATA_ABI_MINOR, this, log, would_log, fail, get_interface};
  args.host = &own_host_;
  api_ = static_cast<const strata_collective_api*>(table);
  return result(api_->open(&args, &self_));
}

void WrappedComm::close() {
  if (self_) api_->close(self_);
  self_ = nullptr;
}

Error WrappedComm::result(strata_status code) { return {code, code == STRATA_OK ? "" : text_}; }

Error WrappedComm::caps(strata_collective_caps* out) { return result(api_->caps(self_, out)); }

Error WrappedComm::alloc(uint64_t bytes, void** out) { return result(api_->alloc(self_, bytes, out)); }

Error WrappedComm::call(Slot slot, const strata_coll_args& args) {
  return result((api_->*slot)(self_, &args, nullptr));
}

Error WrappedComm::barrier(const strata_coll_args& args) { return result(api_->barrier(self_, &args)); }

Error WrappedComm::exchange(const void* in, void* out, uint64_t bytes, const strata_coll_args& args) {
  return result(api_->exchange(self_, in, out, bytes, &args));
}

// --- the host: everything goes on to the real one, but for the text of a failure ------------------------------------

void STRATA_CALL WrappedComm::log(void* ctx, strata_log_level level, const char* domain, const char* text) {
  const strata_host* host = static_cast<WrappedComm*>(ctx)->host_;
  host->log(host->ctx, level, domain, text);
}

int32_t STRATA_CALL WrappedComm::would_log(void* ctx, strata_log_level level) {
  const strata_host* host = static_cast<WrappedComm*>(ctx)->host_;
  return host->would_log(host->ctx, level);
}

strata_status STRATA_CALL WrappedComm::fail(void* ctx, strata_status code, const char* text) {
  static_cast<WrappedComm*>(ctx)->text_ = text;
  return code;
}

// No events: calls are made without one.
const void* STRATA_CALL WrappedComm::get_interface(void*, const char* id) {
  static constexpr strata_executor_api executor = {sizeof(executor), STRATA_ABI_MINOR, parallel_for, threads};
  return std::strcmp(id, STRATA_HOST_EXECUTOR) == 0 ? &executor : nullptr;
}

void STRATA_CALL WrappedComm::parallel_for(void* ctx, uint64_t n, void(STRATA_CALL* fn)(void* arg, uint64_t i),
                                           void* arg) {
  const auto* self = static_cast<WrappedComm*>(ctx);
  self->executor_->parallel_for(self->host_->ctx, n, fn, arg);
}

uint32_t STRATA_CALL WrappedComm::threads(void* ctx) {
  const auto* self = static_cast<WrappedComm*>(ctx);
  return self->executor_->threads(self->host_->ctx);
}

}  // namespace gpu_sim
