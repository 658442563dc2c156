// plugin_kit.h - what every C++ plugin needs at its ABI border, and nothing more.
//
//   options   read a setting by key, with the plugin's own default where the host gave none
//   fail      hand the host the reason of a failure and return its code
//   guard     run the body of a slot so that no exception leaves it
//
// Header-only. The host checks options against the plugin's TOML and fills in defaults; a plugin opened directly by a
// test may get fewer, so every read names its default again. Range checks stay with the plugin.
#pragma once

#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "strata/host.h"

namespace strata::plugin_kit {

// Keeps `text` as the reason and returns `code`.
inline strata_status fail(const strata_host* host, strata_status code, const std::string& text) {
  return host->fail(host->ctx, code, text.c_str());
}

// Runs `body`, turning what it throws into a status. `what` names the call for the text: "offload_cpu alloc".
template <class Body>
strata_status guard(const strata_host* host, const char* what, Body&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return host->fail(host->ctx, STRATA_RESOURCE_EXHAUSTED, what);
  } catch (const std::exception& e) {
    return host->fail(host->ctx, STRATA_INTERNAL, e.what());
  } catch (...) {
    return host->fail(host->ctx, STRATA_INTERNAL, what);
  }
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
