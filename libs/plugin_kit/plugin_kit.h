// plugin_kit.h - what every C++ plugin needs at its ABI border; the README beside it has an example.
//
//   guard           run the body of a slot: what it returns or throws becomes a status, with the text at the host
//   attempt         the same inside a plugin: what is thrown becomes an Error
//   fail            hand the host the reason of a failure and return its code
//   host_interface  one of the host's tables, with its type
//   set_done        set the done event of a call that is done
//   Options         read a setting by key, with the plugin's own default where the host gave none
//
// Header-only. The host checks options against the plugin's TOML and fills in defaults; a plugin opened directly by a
// test may get fewer, so every read names its default again. Range checks stay with the plugin.
#pragma once

#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <type_traits>

#include "plugin_kit/error.h"
#include "strata/host.h"

namespace strata::plugin_kit {

// Keeps `text` as the reason and returns `code`.
inline strata_status fail(const strata_host* host, strata_status code, const std::string& text) {
  return host->fail(host->ctx, code, text.c_str());
}

// Runs `body`, which returns an Error or nothing, and makes an Error of what it throws.
template <class Body>
Error attempt(Body&& body) {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<Body>>) {
      body();
      return {};
    } else {
      return body();
    }
  } catch (const Error& e) {
    return e;
  } catch (const std::bad_alloc&) {
    return {STRATA_RESOURCE_EXHAUSTED, "out of memory"};
  } catch (const std::exception& e) {
    return {STRATA_INTERNAL, e.what()};
  } catch (...) {
    return {STRATA_INTERNAL, "an exception of unknown type"};
  }
}

// Runs the body of a slot. It returns an Error, nothing, or a status whose text the host has already; and it may throw.
// `what` opens the text of an Error: "offload_cpu alloc".
template <class Body>
strata_status guard(const strata_host* host, const char* what, Body&& body) noexcept {
  strata_status status = STRATA_OK;
  Error error;
  try {
    error = attempt([&]() -> Error {
      if constexpr (std::is_same_v<std::invoke_result_t<Body>, strata_status>) {
        status = body();
        return {};
      } else {
        return attempt(std::forward<Body>(body));
      }
    });
    if (error.ok()) return status;
    return error.text().empty() ? error.code() : fail(host, error.code(), std::string(what) + ": " + error.text());
  } catch (...) {  // no memory even for the text
    return host->fail(host->ctx, error.ok() ? STRATA_RESOURCE_EXHAUSTED : error.code(), what);
  }
}

// A table the host lends, or NULL: host_interface<strata_sync_api>(host, STRATA_HOST_SYNC).
template <class Api>
const Api* host_interface(const strata_host* host, const char* id) {
  return static_cast<const Api*>(host->get_interface(host->ctx, id));
}

// Ends a call whose work was done when it returned.
inline Error set_done(const strata_host* host, strata_event* done) {
  if (!done) return {};
  const auto* sync = host_interface<strata_sync_api>(host, STRATA_HOST_SYNC);
  if (!sync) return {STRATA_FAILED_PRECONDITION, "a done event was given by a host without " STRATA_HOST_SYNC};
  sync->set(done, STRATA_OK, nullptr);
  return {};
}

// A view of the options an instance was opened with; valid as long as they are (during `open`).
class Options {
 public:
  explicit Options(const strata_options* list) : list_(list) {}

  bool flag(const char* key, bool fallback) const {
    const strata_option* o = find(key);
    return o ? o->i != 0 : fallback;
  }
  int64_t integer(const char* key, int64_t fallback) const {
    const strata_option* o = find(key);
    return o ? o->i : fallback;
  }
  std::string text(const char* key, const char* fallback) const {
    const strata_option* o = find(key);
    return o && o->s ? o->s : fallback;
  }

 private:
  const strata_option* find(const char* key) const {
    for (uint64_t k = 0; list_ && k < list_->count; ++k) {
      auto* o = reinterpret_cast<const strata_option*>(reinterpret_cast<const char*>(list_->items) + k * list_->stride);
      if (std::strcmp(o->key, key) == 0) return o;
    }
    return nullptr;
  }

  const strata_options* list_;
};

}  // namespace strata::plugin_kit
