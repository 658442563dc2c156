// device_fixture.h - one test body for every plugin that provides strata.device/1, and for every instruction set of
// device_host. An instruction set or a GPU this machine lacks is skipped, by the plugin's own word.
//
// Tests keep their data in host buffers and call the operations through the fixture, which takes the data to the device
// and back where the two are not the same memory.
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
  std::string isa;          // "": the plugin has no such option
  bool own_stream = false;  // on a stream of stream_create, not on one of the CPU domain
};
inline std::string name_of(const DeviceParam& device) {
  return plugin_id(device.plugin) + (device.isa.empty() ? "" : "_" + device.isa) + (device.own_stream ? "_stream" : "");
}
inline void PrintTo(const DeviceParam& device, std::ostream* out) { *out << name_of(device); }

// Elements with `skew` bytes before them, so that no vector load is aligned.
class Buffer {
 public:
  explicit Buffer(size_t bytes, size_t skew = 0) : bytes_(bytes), skew_(skew), data_(bytes + skew + 64, 0xA5) {}
  char* data() { return data_.data() + skew_; }
  const char* data() const { return data_.data() + skew_; }
  size_t bytes() const { return bytes_; }
  size_t skew() const { return skew_; }
  std::vector<char>& with_edges() { return data_; }
  const std::vector<char>& with_edges() const { return data_; }
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

class DeviceTest : public testing::TestWithParam<DeviceParam> {
 protected:
  void SetUp() override { open(); }
  void TearDown() override { close(); }

  // Opens a device on a fresh rank, whose workers inherit the floating point mode of this thread.
  void open() {
    api = load<strata_device_api>(GetParam().plugin, STRATA_DEVICE);
    ASSERT_NE(api, nullptr);
    if (const std::string missing = missing_host_interface(GetParam().plugin); !missing.empty())
      GTEST_SKIP() << missing;
    rank = std::make_unique<Rank>();
    Options options;
    if (!GetParam().isa.empty()) options.set("isa", GetParam().isa);
    const strata_open_args args = rank->args(&options);
    const strata_status code = api->open(&args, &device);
    if (code == STRATA_FAILED_PRECONDITION) GTEST_SKIP() << take_failure(code).text();
    ASSERT_EQ(code, STRATA_OK) << take_failure(code).text();
    strata_device_caps caps{};
    caps.struct_size = sizeof(caps);
    ASSERT_EQ(api->caps(device, &caps), STRATA_OK);
    coherent = caps.flags & STRATA_DEVICE_HOST_COHERENT;
    if (GetParam().own_stream) {
      ASSERT_EQ(api->stream_create(device, 0, &stream), STRATA_OK);
    }
  }
  void close() {
    if (device && GetParam().own_stream) api->stream_destroy(device, &stream);
    if (device) api->close(device);
    device = nullptr;
  }

  // The text of the failure the last call kept.
  std::string reason(strata_status code) { return take_failure(code).text(); }

  void wait() {
    if (GetParam().own_stream) {
      ASSERT_EQ(api->stream_wait_host(device, &stream), STRATA_OK);
    }
  }

  // A buffer where the device's operations can use it.
  class There {
   public:
    There(DeviceTest& test, const Buffer& buffer) : test_(test), here_(buffer) {
      if (test_.coherent) return;
      const std::vector<char>& all = buffer.with_edges();
      EXPECT_EQ(test_.api->alloc(test_.device, all.size(), &memory_), STRATA_OK);
      EXPECT_EQ(test_.api->copy(test_.device, memory_, all.data(), all.size(), &test_.stream), STRATA_OK);
    }
    ~There() { test_.api->free(test_.device, memory_); }
    There(const There&) = delete;

    char* data() const {
      return test_.coherent ? const_cast<char*>(here_.data()) : static_cast<char*>(memory_) + here_.skew();
    }
    // The device's bytes, the edges too, into the buffer they came from. Waits for the stream.
    void back_to(Buffer& buffer) const {
      if (!test_.coherent) {
        std::vector<char>& all = buffer.with_edges();
        EXPECT_EQ(test_.api->copy(test_.device, all.data(), memory_, all.size(), &test_.stream), STRATA_OK);
      }
      test_.wait();
    }

   private:
    DeviceTest& test_;
    const Buffer& here_;
    void* memory_ = nullptr;
  };

  strata_status cast(Buffer& dst, strata_dtype to, const Buffer& src, strata_dtype from, size_t count,
                     strata_rounding rounding) {
    const There d(*this, dst), s(*this, src);
    const char* source = &dst == &src ? d.data() : s.data();
    const strata_status code = api->cast(device, d.data(), to, source, from, count, rounding, &stream);
    d.back_to(dst);
    return code;
  }
  strata_status accumulate(Buffer& dst, const Buffer& src, strata_dtype from, size_t count) {
    const There d(*this, dst), s(*this, src);
    const strata_status code =
        api->accumulate(device, reinterpret_cast<float*>(d.data()), s.data(), from, count, &stream);
    d.back_to(dst);
    return code;
  }
  strata_status square_sums(const Buffer& src, strata_dtype dtype, size_t count, double* sums) {
    const There s(*this, src);
    const strata_status code = api->square_sums(device, s.data(), dtype, count, sums, &stream);
    wait();
    return code;
  }
  strata_status find_nonfinite(const Buffer& src, strata_dtype dtype, size_t count, int64_t* index) {
    const There s(*this, src);
    return api->find_nonfinite(device, s.data(), dtype, count, index, &stream);
  }
  unsigned char byte_at(const void* there) {
    unsigned char value = 0;
    EXPECT_EQ(api->copy(device, &value, there, 1, &stream), STRATA_OK);
    wait();
    return value;
  }

  const strata_device_api* api = nullptr;
  std::unique_ptr<Rank> rank;
  strata_device* device = nullptr;
  bool coherent = true;  // the device's memory is the host's
  strata_stream stream{sizeof(strata_stream), STRATA_ABI_MINOR, STRATA_CPU, 0, nullptr};
};

inline std::vector<DeviceParam> all_devices() {
  std::vector<DeviceParam> all = {{"device_host", "auto"},
                                  {"device_host", "scalar"},
                                  {"device_host", "avx2"},
                                  {"device_host", "avx512"},
                                  {"null", ""}};
#if defined(STRATA_HAVE_CUDA)
  all.push_back({"device_cuda", ""});
  all.push_back({"device_cuda", "", true});
#endif
  if (!plugin_from_outside().empty()) all.push_back({plugin_from_outside(), ""});
  return all;
}

inline std::string device_name(const testing::TestParamInfo<DeviceParam>& info) { return name_of(info.param); }

inline size_t size_of(strata_dtype dtype) { return dtype == STRATA_F32 ? 4 : 2; }

}  // namespace strata::test
