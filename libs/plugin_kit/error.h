// error.h - how the inside of a plugin fails: a status and a text that names what was done, to what, with which
// numbers.
//
// An Error is returned, where the caller goes on (ranks that tell each other), or thrown, where nobody between does;
// a plugin picks one way for itself. Both end in `guard` (slots.h), which hands the text to the host.
#pragma once

#include <sstream>
#include <string>
#include <utility>

#include "strata/abi.h"

namespace strata::plugin_kit {

class [[nodiscard]] Error {
 public:
  Error() = default;
  // An empty text means that the host has it already: a call into the host, or into another plugin, failed.
  Error(strata_status code, std::string text) : code_(code), text_(std::move(text)) {}
  bool ok() const { return code_ == STRATA_OK; }
  strata_status code() const { return code_; }
  const std::string& text() const { return text_; }

 private:
  strata_status code_ = STRATA_OK;
  std::string text_;
};

template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// raise(STRATA_OUT_OF_RANGE, "param ", index, " of ", count);
template <class... Parts>
[[noreturn]] void raise(strata_status code, const Parts&... parts) {
  throw Error(code, join(parts...));
}

// "NOT_FOUND"; a number for a code that has no name here.
inline std::string status_name(strata_status code) {
  static constexpr const char* names[] = {STRATA_STATUS_NAMES};
  return code >= STRATA_OK && code <= STRATA_AGAIN ? names[code] : std::to_string(code);
}

}  // namespace strata::plugin_kit
