// error.h - how this plugin fails inside: an exception with a status and a text. It ends in checkpoint.cc, where the
// slots of the table turn it into host->fail.
#pragma once

#include <cerrno>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>

#include "strata/abi.h"

namespace strata::checkpoint {

struct Error : std::exception {
  Error(strata_status status, std::string message) : code(status), text(std::move(message)) {}
  const char* what() const noexcept override { return text.c_str(); }

  strata_status code;
  std::string text;  // empty: the host has the text already (a failed callback)
};

template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void raise(strata_status code, const Parts&... parts) {
  throw Error(code, join(parts...));
}

inline strata_status status_of_errno(int e) {
  switch (e) {
    case ENOENT:
    case ENOTDIR:
      return STRATA_NOT_FOUND;
    case EEXIST:
    case ENOTEMPTY:
      return STRATA_ALREADY_EXISTS;
    case EACCES:
    case EPERM:
    case EROFS:
      return STRATA_PERMISSION_DENIED;
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return STRATA_RESOURCE_EXHAUSTED;
    case EIO:
    case ENODATA:
      return STRATA_DATA_LOSS;
    default:
      return STRATA_INTERNAL;
  }
}

// "<what> <path>: <text of the errno>", with the status that fits.
[[noreturn]] inline void raise_errno(int e, const std::string& what, const std::string& path) {
  raise(status_of_errno(e), what, " ", path, ": ", std::strerror(e));
}

}  // namespace strata::checkpoint
