// error.h - how this plugin fails inside: it throws the kit's Error; the slots in checkpoint.cc end it.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include "plugin_kit/error.h"

namespace strata::checkpoint {

using plugin_kit::Error;
using plugin_kit::join;
using plugin_kit::raise;

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
