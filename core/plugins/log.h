// log.h - the default destination of log lines: stderr, through spdlog. The only file that includes it is log.cc.
#pragma once

#include <atomic>
#include <memory>

#include "core/plugins/host.h"

namespace strata {

// Lines look like "12:30:01.123 [info] [rank 2] strata: plan: ..."; without the rank while it is negative.
LogSink stderr_sink(std::shared_ptr<const std::atomic<int>> rank);

}  // namespace strata
