#include "core/plugins/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace strata {

namespace {
spdlog::level::level_enum spdlog_level(strata_log_level level) {
  switch (level) {
    case STRATA_LOG_DEBUG:
      return spdlog::level::debug;
    case STRATA_LOG_INFO:
      return spdlog::level::info;
    case STRATA_LOG_WARN:
      return spdlog::level::warn;
    default:
      return spdlog::level::err;
  }
}
}  // namespace

LogSink stderr_sink(std::shared_ptr<const std::atomic<int>> rank) {
  auto logger = std::make_shared<spdlog::logger>("strata", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_level(spdlog::level::debug);
  logger->set_pattern("%H:%M:%S.%e [%^%l%$] %v");
  return [logger, rank](strata_log_level level, const std::string& domain, const std::string& text) {
    const char* who = level == STRATA_LOG_HOST_MISBEHAVING     ? "(host misbehaving) "
                      : level == STRATA_LOG_PLUGIN_MISBEHAVING ? "(plugin misbehaving) "
                                                               : "";
    const std::string label = *rank < 0 ? "" : "[rank " + std::to_string(*rank) + "] ";
    logger->log(spdlog_level(level), "{}{}: {}{}", label, domain, who, text);
  };
}

}  // namespace strata
