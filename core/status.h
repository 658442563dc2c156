// status.h - the one error type of the core: a code and a text; ok carries nothing.
//
// Functions of the core return Status (or set an out parameter and return Status); nothing throws across a module
// border. The text says what was being done, to what, with which numbers, and which manifest key would change it.
#pragma once

#include <string>
#include <utility>

#include "strata/abi.h"

namespace strata {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(strata_status code, std::string text) : code_(code), text_(std::move(text)) {}

  bool ok() const { return code_ == STRATA_OK; }
  strata_status code() const { return code_; }
  const std::string& text() const { return text_; }

  // The same error with what the caller was doing in front: "gather layer3: rank 2 is missing".
  Status during(const std::string& what) const { return ok() ? *this : Status(code_, what + ": " + text_); }

 private:
  strata_status code_ = STRATA_OK;
  std::string text_;
};

inline Status Ok() { return {}; }

const char* status_name(strata_status code);

}  // namespace strata

#define STRATA_RETURN_IF_ERROR(expr)                        \
  do {                                                      \
    if (::strata::Status status_ = (expr); !status_.ok()) { \
      return status_;                                       \
    }                                                       \
  } while (0)
