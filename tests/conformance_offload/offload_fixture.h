// offload_fixture.h - opens one tier for a test.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "core/plugins/event.h"
#include "strata/iface/offload.h"
#include "tests/support/plugin_fixture.h"

namespace strata::test {

class Tier {
 public:
  explicit Tier(const std::string& plugin) : Tier(load<strata_offload_api>(plugin, STRATA_OFFLOAD)) {}
  explicit Tier(const strata_offload_api* table) : api(table) {}
  ~Tier() { close(); }
  Tier(const Tier&) = delete;

  strata_status open(Options options = {}, const void* device = nullptr, void* device_self = nullptr) {
    strata_open_args args = rank.args(&options);
    args.device = device;
    args.device_self = device_self;
    return api->open(&args, &self);
  }
  void close() {
    if (self) api->close(self);
    self = nullptr;
  }
  strata_offload_caps caps() {
    strata_offload_caps caps{};
    caps.struct_size = sizeof(caps);
    EXPECT_EQ(api->caps(self, &caps), STRATA_OK);
    return caps;
  }
  strata_region alloc(uint64_t bytes, const char* label = "layer3 exp_avg") {
    strata_region region = 0;
    const strata_status code = api->alloc(self, bytes, label, &region);
    EXPECT_EQ(code, STRATA_OK) << take_failure(code).text();
    return region;
  }
  strata_status read(strata_region region, uint64_t offset, void* buffer, uint64_t bytes,
                     strata_event* done = nullptr) {
    const strata_io_args io{sizeof(io), STRATA_ABI_MINOR, region, offset, bytes, buffer};
    return api->read(self, &io, done);
  }
  strata_status write(strata_region region, uint64_t offset, void* buffer, uint64_t bytes,
                      strata_event* done = nullptr) {
    const strata_io_args io{sizeof(io), STRATA_ABI_MINOR, region, offset, bytes, buffer};
    return api->write(self, &io, done);
  }

  const strata_offload_api* api;
  Rank rank;
  strata_offload* self = nullptr;
};

// The text of the failure with code `code` that the last call kept.
inline std::string reason(strata_status code) { return take_failure(code).text(); }

}  // namespace strata::test
