// log.h - the default destination of log lines: stderr, through spdlog. The only file that includes it is log.cc.
#pragma once

#include "core/host.h"

namespace strata {

// Lines look like "12:30:01.123 [rank 2] [info] plan: ...".
LogSink stderr_sink();

}  // namespace strata
