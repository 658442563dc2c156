// device_cuda_fixture.h - device_cuda on the first GPU, with what its own tests need beside the conformance tests.
// Without a GPU they are skipped, by the plugin's own word.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "strata/iface/device.h"
#include "tests/support/plugin_fixture.h"

namespace strata::test {

// Runs tests of this program once more, in a process of their own with `variable` ("NAME=value") set. 0: they passed.
inline int run_alone(const std::string& variable, const std::string& filter) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command = variable + " timeout 120 '" + self + "' --gtest_filter='" + filter + "' >&2";
  return std::system(command.c_str());
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override { open(Options()); }
  void TearDown() override { close(); }

  void open(Options options) {
    close();
    const strata_open_args args = rank.args(&options);
    const strata_status code = api->open(&args, &device);
    if (code == STRATA_FAILED_PRECONDITION) GTEST_SKIP() << take_failure(code).text();
    ASSERT_EQ(code, STRATA_OK) << take_failure(code).text();
  }
  void close() {
    if (device) api->close(device);
    device = nullptr;
  }
  std::string reason(strata_status code) { return take_failure(code).text(); }

  strata_device_caps caps() {
    strata_device_caps out{};
    out.struct_size = sizeof(out);
    EXPECT_EQ(api->caps(device, &out), STRATA_OK);
    return out;
  }
  char* alloc(uint64_t bytes) {
    void* ptr = nullptr;
    const strata_status code = api->alloc(device, bytes, &ptr);
    EXPECT_EQ(code, STRATA_OK) << reason(code);
    return static_cast<char*>(ptr);
  }
  char* alloc_pinned(uint64_t bytes) {
    void* ptr = nullptr;
    const strata_status code = api->alloc_pinned(device, bytes, &ptr);
    EXPECT_EQ(code, STRATA_OK) << reason(code);
    return static_cast<char*>(ptr);
  }
  strata_stream stream(int32_t priority = 0) {
    strata_stream out{};
    const strata_status code = api->stream_create(device, priority, &out);
    EXPECT_EQ(code, STRATA_OK) << reason(code);
    return out;
  }
  // Done at return, on a stream of the CPU domain.
  template <class T>
  void put(void* there, const std::vector<T>& values) {
    EXPECT_EQ(api->copy(device, there, values.data(), values.size() * sizeof(T), nullptr), STRATA_OK);
  }
  template <class T>
  std::vector<T> get(const void* there, size_t count) {
    std::vector<T> values(count);
    EXPECT_EQ(api->copy(device, values.data(), there, count * sizeof(T), nullptr), STRATA_OK);
    return values;
  }

  const strata_device_api* api = load<strata_device_api>("device_cuda", STRATA_DEVICE);
  Rank rank;
  strata_device* device = nullptr;
};

}  // namespace strata::test
