// fault_fixture.h - a rank whose plugins come through the real loader, so that `fault` finds what it wraps the way it
// does in a run. Every test names its own gates and tags: they belong to the process.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/plugins/event.h"
#include "core/plugins/plugins.h"
#include "strata/draft/fault_control.h"
#include "strata/iface/offload.h"
#include "tests/support/plugin_fixture.h"
#include "tests/support/waiting.h"

namespace strata::test {

using OptionMap = std::map<std::string, std::variant<bool, int64_t, double, std::string>>;

inline const strata_fault_control_api* control() {
  static auto* const api = load<strata_fault_control_api>("fault", STRATA_FAULT_CONTROL);
  return api;
}

inline std::string unique(const std::string& what) {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  return std::string(info->test_suite_name()) + "." + info->name() + "." + what;
}

inline PluginSearch this_build() {
  PluginSearch search;
  search.directories = {std::string(STRATA_BUILD_DIR) + "/lib/plugins", LATE_FAILURE_DIR};
  return search;
}

inline std::map<std::string, std::vector<PluginOption>> plugin_options(const std::map<std::string, OptionMap>& given) {
  std::map<std::string, std::vector<PluginOption>> all;
  for (const auto& [plugin, options] : given) {
    for (const auto& [key, value] : options) all[plugin].push_back({key, value, "test"});
  }
  return all;
}

class FaultRank {
 public:
  explicit FaultRank(const std::map<std::string, OptionMap>& options, int32_t rank = 0)
      : set(this_build(), plugin_options(options)),
        host([](strata_log_level, const std::string&, const std::string&) {}, STRATA_LOG_DEBUG, 2, &set) {
    args.struct_size = sizeof(args);
    args.host = host.c();
    args.job = "fault_test";
    args.rank = rank;
    args.world = args.local_world = 1;
    args.threads = 1;
    args.deadline_ns = 20'000'000'000;
  }

  // Opens `fault` as `interface_id`; what it wraps is in its options.
  template <class Api, class Handle>
  Status open(const char* interface_id, const Api** api, Handle** self) {
    STRATA_RETURN_IF_ERROR(set.find("fault", interface_id, api));
    STRATA_RETURN_IF_ERROR(set.options("fault", &args.options));
    return take_failure((*api)->open(&args, self));
  }

  PluginSet set;
  Host host;
  strata_open_args args{};
};

// A tier behind `fault`, over offload_cpu unless `wraps` says otherwise.
class FaultTier {
 public:
  explicit FaultTier(OptionMap fault, int32_t rank = 0, int64_t deadline_ns = 20'000'000'000)
      : rank_({{"fault", with_defaults(std::move(fault))}, {"offload_cpu", {{"budget_bytes", int64_t{1} << 20}}}},
              rank) {
    rank_.args.deadline_ns = deadline_ns;
    opened = rank_.open(STRATA_OFFLOAD, &api, &self);
    if (!opened.ok()) return;
    EXPECT_EQ(api->alloc(self, kBytes, "region", &region), STRATA_OK);
  }
  ~FaultTier() { close(); }
  void close() {
    if (self) api->close(self);
    self = nullptr;
  }
  strata_status write(char value, uint64_t bytes = kBytes, strata_event* done = nullptr) {
    data.assign(kBytes, value);
    const strata_io_args io{sizeof(io), STRATA_ABI_MINOR, region, 0, bytes, data.data()};
    return api->write(self, &io, done);
  }
  // What the region holds, read through the slot "read".
  std::string contents() {
    std::string text(kBytes, '?');
    const strata_io_args io{sizeof(io), STRATA_ABI_MINOR, region, 0, kBytes, text.data()};
    const strata_status code = api->read(self, &io, nullptr);
    EXPECT_EQ(code, STRATA_OK) << take_failure(code).text();
    return text;
  }

  static constexpr uint64_t kBytes = 8;
  const strata_offload_api* api = nullptr;
  strata_offload* self = nullptr;
  Status opened;
  strata_region region = 0;
  std::string data;

 private:
  static OptionMap with_defaults(OptionMap fault) {
    fault.try_emplace("wraps", std::string("offload_cpu"));
    return fault;
  }
  FaultRank rank_;
};

inline std::string reason(strata_status code) { return take_failure(code).text(); }

// False after ten seconds.
template <class Condition>
bool eventually(Condition condition) {
  return eventually(condition, std::chrono::seconds(10));
}

}  // namespace strata::test
