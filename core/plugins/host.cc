#include "core/plugins/host.h"

#include <iterator>
#include <new>

namespace strata {
namespace {

thread_local std::string failure_text;
thread_local const char* callback = nullptr;

Host* self(void* ctx) { return static_cast<Host*>(ctx); }

void STRATA_CALL host_log(void* ctx, strata_log_level level, const char* domain, const char* text) {
  self(ctx)->log(level, domain ? domain : "", text ? text : "");
}

int32_t STRATA_CALL host_would_log(void* ctx, strata_log_level level) { return self(ctx)->would_log(level) ? 1 : 0; }

strata_status STRATA_CALL host_fail(void*, strata_status code, const char* text) {
  failure_text = text ? text : "";
  return code;
}

strata_event* STRATA_CALL sync_create(void*) { return new (std::nothrow) strata_event; }
void STRATA_CALL sync_retain(strata_event* event) { event->retain(); }
void STRATA_CALL sync_release(strata_event* event) { event->release(); }
void STRATA_CALL sync_set(strata_event* event, strata_status code, const char* text) {
  event->set(code == STRATA_OK ? Ok() : Status(code, text ? text : ""));
}
int32_t STRATA_CALL sync_is_set(strata_event* event) { return event->is_set() ? 1 : 0; }
strata_status STRATA_CALL sync_wait(strata_event* event, int64_t timeout_ns) {
  return keep_failure(event->wait(std::chrono::nanoseconds(timeout_ns)));
}
void STRATA_CALL sync_set_from(strata_event* event, strata_event* source) { event->set(source->wait({})); }
const strata_sync_api sync_table = {sizeof(strata_sync_api),
                                    STRATA_ABI_MINOR,
                                    sync_create,
                                    sync_retain,
                                    sync_release,
                                    sync_set,
                                    sync_is_set,
                                    sync_wait,
                                    sync_set_from};

void STRATA_CALL executor_parallel_for(void* ctx, uint64_t n, void(STRATA_CALL* fn)(void*, uint64_t), void* arg) {
  self(ctx)->executor().parallel_for(n, fn, arg);
}
uint32_t STRATA_CALL executor_threads(void* ctx) { return self(ctx)->executor().threads(); }
const strata_executor_api executor_table = {sizeof(strata_executor_api), STRATA_ABI_MINOR, executor_parallel_for,
                                            executor_threads};

strata_status STRATA_CALL plugins_find(void* ctx, const char* name, const char* id, const void** table) {
  return keep_failure(self(ctx)->plugins()->find(name, id, table));
}
strata_status STRATA_CALL plugins_options(void* ctx, const char* name, const strata_options** out) {
  return keep_failure(self(ctx)->plugins()->options(name, out));
}
const strata_plugins_api plugins_table = {sizeof(strata_plugins_api), STRATA_ABI_MINOR, plugins_find, plugins_options};

const void* STRATA_CALL host_get_interface(void* ctx, const char* id) {
  const std::string name = id ? id : "";
  if (name == STRATA_HOST_SYNC) return &sync_table;
  if (name == STRATA_HOST_EXECUTOR) return &executor_table;
  if (name == STRATA_HOST_PLUGINS) return self(ctx)->plugins() ? &plugins_table : nullptr;
  return nullptr;
}

}  // namespace

Host::Host(LogSink sink, strata_log_level level, unsigned threads, PluginFinder* plugins)
    : sink_(std::move(sink)),
      level_(level),
      executor_(std::make_unique<Executor>(threads, std::vector<int>())),
      plugins_(plugins) {
  table_ = {sizeof(strata_host), STRATA_ABI_MINOR, this, host_log, host_would_log, host_fail, host_get_interface};
}

void Host::log(strata_log_level level, const std::string& domain, const std::string& text) const {
  if (!would_log(level) || !sink_ || callback) return;
  const HostCallback running("a log callback");
  try {
    sink_(level, domain, text);
  } catch (...) {  // the host's callback must not; a line is not worth the process
  }
}

HostCallback::HostCallback(const char* name) { callback = name; }
HostCallback::~HostCallback() { callback = nullptr; }
const char* HostCallback::running() { return callback; }

Status take_failure(strata_status code) {
  std::string text = std::move(failure_text);
  failure_text.clear();
  if (code == STRATA_OK) return Ok();
  return {code, text.empty() ? std::string(status_name(code)) : text};
}

strata_status keep_failure(const Status& status) {
  if (!status.ok()) failure_text = status.text();
  return status.code();
}

const char* status_name(strata_status code) {
  static constexpr const char* names[] = {STRATA_STATUS_NAMES};
  static_assert(std::size(names) == STRATA_AGAIN + 1);
  return code >= 0 && code <= STRATA_AGAIN ? names[code] : "INTERNAL";
}

}  // namespace strata
