#include "tests/train/gpu.h"

#include <gtest/gtest.h>

#include <cstring>

namespace strata::test {

Gpu::Gpu(const std::string& job, int rank, int world, int delay_us)
    : host_(rank, world, true, job),
      api_(load<strata_device_api>(std::string(STRATA_TEST_PLUGIN_DIR) + "/gpu_sim.so", STRATA_DEVICE)) {
  options_.set("memory_bytes", int64_t{1} << 30).set("delay_us", delay_us);
  const strata_open_args args = host_.args(&options_);
  EXPECT_EQ(api_->open(&args, &self_), STRATA_OK);
  EXPECT_EQ(api_->stream_create(self_, 0, &stream_), STRATA_OK);
}

Gpu::~Gpu() {
  wait();
  api_->stream_destroy(self_, &stream_);
  api_->close(self_);
}

strata_tensor Gpu::gradient(const strata_tensor& weight, const std::vector<float>& noise) {
  const uint64_t bytes = noise.size() * sizeof(float);
  if (bytes > 0) {
    EXPECT_EQ(api_->alloc_pinned(self_, bytes, &pinned_.emplace_back()), STRATA_OK);
    EXPECT_EQ(api_->alloc(self_, bytes, &device_.emplace_back()), STRATA_OK);
    std::memcpy(pinned_.back(), noise.data(), bytes);
    auto* sum = static_cast<float*>(device_.back());
    EXPECT_EQ(api_->copy(self_, sum, pinned_.back(), bytes, &stream_), STRATA_OK);
    EXPECT_EQ(api_->accumulate(self_, sum, weight.data, weight.dtype, noise.size(), &stream_), STRATA_OK);
  }
  strata_tensor t = weight;
  t.data = bytes > 0 ? device_.back() : weight.data;
  t.dtype = STRATA_F32;
  return t;
}

void Gpu::wait() {
  EXPECT_EQ(api_->stream_wait_host(self_, &stream_), STRATA_OK);
  for (void* p : device_) api_->free(self_, p);
  for (void* p : pinned_) api_->free_pinned(self_, p);
  device_.clear();
  pinned_.clear();
}

}  // namespace strata::test
