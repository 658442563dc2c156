// device_fixture.h - one test body for every plugin that provides strata.device/1 on host memory, and for every
// instruction set of device_host. An instruction set this machine lacks is skipped, by the plugin's own word.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "strata/iface/device.h"
#include "tests/support/plugin_fixture.h"

namespace strata::test {

struct DeviceParam {
  std::string plugin;
  std::string isa;  // "": the plugin has no such option
};
inline void PrintTo(const DeviceParam& device, std::ostream* out) { *out << device.plugin << " " << device.isa; }

class DeviceTest : public testing::TestWithParam<DeviceParam> {
 protected:
  void SetUp() override { open(); }
  void TearDown() override { close(); }

  // Opens a device on a fresh rank, whose workers inherit the floating point mode of this thread.
  void open() {
    api = load<strata_device_api>(GetParam().plugin, STRATA_DEVICE);
    ASSERT_NE(api, nullptr);
    rank = std::make_unique<Rank>();
    Options options;
    if (!GetParam().isa.empty()) options.set("isa", GetParam().isa);
    const strata_open_args args = rank->args(&options);
    const strata_status code = api->open(&args, &device);
    if (code == STRATA_FAILED_PRECONDITION) GTEST_SKIP() << take_failure(code).text();
    ASSERT_EQ(code, STRATA_OK) << take_failure(code).text();
  }
  void close() {
    if (device) api->close(device);
    device = nullptr;
  }

  // The text of the failure the last call kept.
  std::string reason(strata_status code) { return take_failure(code).text(); }

  const strata_device_api* api = nullptr;
  std::unique_ptr<Rank> rank;
  strata_device* device = nullptr;
  strata_stream stream{sizeof(strata_stream), STRATA_ABI_MINOR, STRATA_CPU, 0, nullptr};
};

inline std::vector<DeviceParam> host_devices() {
  return {{"device_host", "auto"},
          {"device_host", "scalar"},
          {"device_host", "avx2"},
          {"device_host", "avx512"},
          {"null", ""}};
}

inline std::string device_name(const testing::TestParamInfo<DeviceParam>& info) {
  return info.param.plugin + (info.param.isa.empty() ? "" : "_" + info.param.isa);
}

// Elements with `skew` bytes before them, so that no vector load is aligned.
class Buffer {
 public:
  explicit Buffer(size_t bytes, size_t skew = 0) : bytes_(bytes), skew_(skew), data_(bytes + skew + 64, 0xA5) {}
  char* data() { return data_.data() + skew_; }
  const char* data() const { return data_.data() + skew_; }
  size_t bytes() const { return bytes_; }
  template <class T>
  T get(size_t i) const {
    T value;
    std::memcpy(&value, data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void put(size_t i, T value) {
    std::memcpy(data() + i * sizeof(T), &value, sizeof(T));
  }
  // True when nothing outside [data, data + bytes) was written.
  bool edges_whole() const {
    for (size_t i = 0; i < skew_; ++i) {
      if (data_[i] != '\xA5') return false;
    }
    for (size_t i = skew_ + bytes_; i < data_.size(); ++i) {
      if (data_[i] != '\xA5') return false;
    }
    return true;
  }

 private:
  size_t bytes_, skew_;
  std::vector<char> data_;
};

inline size_t size_of(strata_dtype dtype) { return dtype == STRATA_F32 ? 4 : 2; }

}  // namespace strata::test
