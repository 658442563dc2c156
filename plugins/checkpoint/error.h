// error.h - how this plugin fails inside: it throws the kit's Error; the slots in checkpoint.cc end it.
#pragma once

#include "plugin_kit/os_error.h"

namespace strata::checkpoint {

using plugin_kit::Error;
using plugin_kit::join;
using plugin_kit::raise;
using plugin_kit::raise_errno;

}  // namespace strata::checkpoint
