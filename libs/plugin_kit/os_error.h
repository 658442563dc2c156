// os_error.h - a failed system call as a status: the code that fits the errno, and a text with what was done to which
// path.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include "plugin_kit/error.h"

namespace strata::plugin_kit {

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
    case ETIMEDOUT:
      return STRATA_DEADLINE_EXCEEDED;
    case ENODEV:
    case ENXIO:
    case ESTALE:
      return STRATA_UNAVAILABLE;
    default:
      return STRATA_INTERNAL;
  }
}

// "<what> <path>: <text of the errno>", with the status that fits.
inline Error os_error(int e, const std::string& what, const std::string& path) {
  return {status_of_errno(e), what + " " + path + ": " + std::strerror(e)};
}

[[noreturn]] inline void raise_errno(int e, const std::string& what, const std::string& path) {
  throw os_error(e, what, path);
}

}  // namespace strata::plugin_kit
